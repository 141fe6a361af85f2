// Every CUDA call goes through check(): a failure carries CUDA's code and name.
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

// A launch reports bad arguments only through the last error.
inline void check_launch(const char* what) {
    check(cudaGetLastError(), what);
}

}  // namespace aiokv::cuda
