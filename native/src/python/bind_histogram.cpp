#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "aiokv/histogram.hpp"
#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace aiokv {

void bind_histogram(nb::module_& m) {
    nb::class_<Histogram>(m, "Histogram", "Durations in buckets bounded by powers of two seconds.")
        .def(nb::init<>())
        .def(
            "add",
            [](Histogram& self, double seconds) {
                const double known = seconds > 0 ? std::min(seconds, 1e9) : 0.0;
                self.add(static_cast<std::uint64_t>(known * 1e9 + 0.5));
            },
            "seconds"_a, "Count a duration; a negative one as 0.")
        .def_prop_ro(
            "counts",
            [](const Histogram& self) {
                return std::vector<std::uint64_t>(self.counts().begin(), self.counts().end());
            },
            "Durations per bucket.")
        .def_prop_ro(
            "sum_seconds",
            [](const Histogram& self) { return static_cast<double>(self.sum_nanoseconds()) / 1e9; })
        .def_static(
            "bounds_seconds",
            [] {
                std::vector<double> bounds;
                for (int e = Histogram::kFirstExponent; e <= Histogram::kLastExponent; ++e) {
                    bounds.push_back(std::ldexp(1.0, e));
                }
                return bounds;
            },
            "Return the upper bounds of all buckets but the last, which has none.");
}

}  // namespace aiokv
