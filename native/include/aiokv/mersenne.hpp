// Arithmetic modulo the prime 2^127 - 1, on the CPU and in kernels.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define AIOKV_HOST_DEVICE __host__ __device__
#else
#define AIOKV_HOST_DEVICE
#endif

namespace aiokv::mersenne {

using U128 = unsigned __int128;

inline constexpr U128 kPrime = (U128{1} << 127) - 1;

// Returns x mod kPrime for any x.
AIOKV_HOST_DEVICE inline U128 reduced(U128 x) {
    x = (x & kPrime) + (x >> 127);
    return x >= kPrime ? x - kPrime : x;
}

// Returns a * b mod kPrime for a and b of at most 127 bits.
AIOKV_HOST_DEVICE inline U128 multiplied(U128 a, U128 b) {
    const auto a0 = static_cast<std::uint64_t>(a), a1 = static_cast<std::uint64_t>(a >> 64);
    const auto b0 = static_cast<std::uint64_t>(b), b1 = static_cast<std::uint64_t>(b >> 64);
    const U128 low = U128{a0} * b0;
    const U128 middle = U128{a0} * b1 + U128{a1} * b0;  // each below 2^127
    const U128 high = U128{a1} * b1;
    const U128 low_bits = low + (middle << 64);
    const U128 high_bits = high + (middle >> 64) + (low_bits < low);  // below 2^126
    return reduced(reduced(low_bits) + (high_bits << 1));             // 2^128 is 2 mod kPrime
}

}  // namespace aiokv::mersenne
