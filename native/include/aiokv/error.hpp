// Exceptions of the native code; bind_errors.cpp turns each into the class of aiokv.errors
// that bears its name.
//
//   throw LeaseError("commit: 9 tokens exceed the 8 of the lease").of(id).hint("call extend");
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace aiokv {

// Details beside the message. Python has them as attributes of the exception.
struct ErrorDetails {
    std::string hint;          // advice to the user
    std::string config_field;  // the field of CacheConfig that sets the limit, or ""
    std::uint64_t lease = 0;   // lease that the error concerns, or 0
};

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
    ErrorDetails details;
};

// Setters that return the error itself, so that it can be thrown in the same expression.
template <class Self>
struct DetailedError : Error {
    using Error::Error;

    Self& hint(std::string text) {
        details.hint = std::move(text);
        return static_cast<Self&>(*this);
    }
    Self& field(std::string name) {
        details.config_field = std::move(name);
        return static_cast<Self&>(*this);
    }
    Self& of(std::uint64_t lease) {
        details.lease = lease;
        return static_cast<Self&>(*this);
    }
};

struct ConfigError : DetailedError<ConfigError> {
    using DetailedError::DetailedError;
};

struct LayoutError : DetailedError<LayoutError> {
    using DetailedError::DetailedError;
};

struct LeaseError : DetailedError<LeaseError> {
    using DetailedError::DetailedError;
};

struct UsageError : DetailedError<UsageError> {
    using DetailedError::DetailedError;
};

struct RequestTooLarge : DetailedError<RequestTooLarge> {
    using DetailedError::DetailedError;
};

struct InternalError : DetailedError<InternalError> {
    using DetailedError::DetailedError;
};

// `code`: CUDA's error code; 0 for other errors.
struct DeviceError : DetailedError<DeviceError> {
    DeviceError(const std::string& message, int cuda_code)
        : DetailedError(message), code(cuda_code) {}
    int code;
};

}  // namespace aiokv
