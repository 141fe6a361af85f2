// Exceptions of the native code; bind_errors.cpp turns each into the class of aiokv.errors
// that bears its name.
#pragma once

#include <stdexcept>
#include <string>

namespace aiokv {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct ConfigError : Error {
    using Error::Error;
};

struct LayoutError : Error {
    using Error::Error;
};

struct LeaseError : Error {
    using Error::Error;
};

struct UsageError : Error {
    using Error::Error;
};

struct RequestTooLarge : Error {
    using Error::Error;
};

struct InternalError : Error {
    using Error::Error;
};

// `code` is CUDA's; 0 when the error is not.
struct DeviceError : Error {
    DeviceError(const std::string& message, int cuda_code) : Error(message), code(cuda_code) {}
    int code;
};

}  // namespace aiokv
