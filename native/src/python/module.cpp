// The extension module: each bind_*.cpp registers one folder of native/src.
#include "bindings.hpp"

using namespace nanobind::literals;

namespace {

// How this extension was built, for `aiokv doctor`.
nanobind::typed<nanobind::dict, nanobind::str, nanobind::object> build_info() {
    nanobind::dict info;
#if defined(__clang__)
    info["compiler"] = __VERSION__;
#else
    info["compiler"] = "GCC " __VERSION__;
#endif
    info["type"] = AIOKV_BUILD_TYPE;
#ifdef __OPTIMIZE__
    info["optimized"] = true;
#else
    info["optimized"] = false;
#endif
    info["cuda_architectures"] = AIOKV_CUDA_ARCHITECTURES;
    return nanobind::borrow<nanobind::typed<nanobind::dict, nanobind::str, nanobind::object>>(info);
}

}  // namespace

NB_MODULE(_native, m) {
    // A process may end while it holds an engine. nanobind would then report each object as a
    // leak.
    nanobind::set_leak_warnings(false);
    m.doc() = "Native core of aiokv: prefix index, block pools, block copies, file I/O.";
    m.def(
        "keep_forever", [](nanobind::object object) { static_cast<void>(object.release()); },
        "object"_a,
        "Never destroy an object: a forked process lacks the threads that its destructor joins.");
    m.def("build_info", &build_info,
          "Return how the extension was built: compiler, type (of CMake), optimized, and "
          "cuda_architectures (as CMake has them, separated by commas; empty without CUDA).");
    aiokv::bind_errors(m);
    aiokv::bind_copy(m);
    aiokv::bind_histogram(m);
    aiokv::bind_core(m);
    aiokv::bind_events(m);
    aiokv::bind_digest(m);
    aiokv::bind_store(m);
    aiokv::bind_io(m);
    aiokv::bind_repack(m);
    aiokv::bind_turn(m);
#ifdef AIOKV_HAS_CUDA
    aiokv::bind_cuda(m);
#endif
}
