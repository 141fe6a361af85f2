// One function per bind_*.cpp file; module.cpp calls all of them.
#pragma once

#include <nanobind/nanobind.h>

namespace aiokv {

void bind_copy(nanobind::module_& m);
void bind_core(nanobind::module_& m);
#ifdef AIOKV_HAS_CUDA
void bind_cuda(nanobind::module_& m);
#endif
void bind_digest(nanobind::module_& m);
void bind_errors(nanobind::module_& m);
void bind_events(nanobind::module_& m);
void bind_histogram(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_io(nanobind::module_& m);
void bind_repack(nanobind::module_& m);
void bind_turn(nanobind::module_& m);

}  // namespace aiokv
