// The extension module: each bind_*.cpp registers one folder of native/src.
#include "bindings.hpp"

using namespace nanobind::literals;

NB_MODULE(_native, m) {
    m.doc() = "Native core of aiokv: prefix index, block pools, block copies, file I/O.";
    m.def(
        "keep_forever",
        [](nanobind::object object) {
            nanobind::set_leak_warnings(false);
            static_cast<void>(object.release());
        },
        "object"_a,
        "Never destroy an object: a forked process lacks the threads that its destructor joins.");
    aiokv::bind_errors(m);
    aiokv::bind_copy(m);
    aiokv::bind_histogram(m);
    aiokv::bind_core(m);
    aiokv::bind_events(m);
    aiokv::bind_digest(m);
    aiokv::bind_store(m);
    aiokv::bind_io(m);
    aiokv::bind_repack(m);
#ifdef AIOKV_HAS_CUDA
    aiokv::bind_cuda(m);
#endif
}
