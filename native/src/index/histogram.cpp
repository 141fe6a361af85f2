#include "aiokv/histogram.hpp"

#include <algorithm>
#include <cmath>

namespace aiokv {

void Histogram::add(std::uint64_t nanoseconds) {
    int exponent = 0;
    const double fraction = std::frexp(static_cast<double>(nanoseconds) / 1e9, &exponent);
    if (fraction == 0.5) --exponent;  // a duration equal to a bound belongs to the bucket below it
    if (nanoseconds == 0) exponent = kFirstExponent;
    const int bucket = std::clamp(exponent, kFirstExponent, kLastExponent + 1) - kFirstExponent;
    ++counts_[static_cast<std::size_t>(bucket)];
    sum_nanoseconds_ += nanoseconds;
}

}  // namespace aiokv
