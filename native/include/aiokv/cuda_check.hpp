// Checks of CUDA calls: a failure carries CUDA's code and name.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "aiokv/error.hpp"

namespace aiokv::cuda {

inline std::string describe(cudaError_t code, const char* what) {
    return std::string(what) + ": " + cudaGetErrorName(code) + " (" +
           std::to_string(static_cast<int>(code)) + "), " + cudaGetErrorString(code);
}

// Also clears the thread's last error, so that a later launch check does not find this one.
inline void check(cudaError_t code, const char* what) {
    if (code != cudaSuccess) {
        cudaGetLastError();
        throw DeviceError(describe(code, what), static_cast<int>(code));
    }
}

// CUDA reports bad arguments of a launch only as the thread's last error.
inline void check_launch(const char* what) {
    check(cudaGetLastError(), what);
}

}  // namespace aiokv::cuda
