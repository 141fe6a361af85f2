// The extension module: each bind_*.cpp registers one folder of native/src.
#include "bindings.hpp"

NB_MODULE(_native, m) {
    m.doc() = "Native core of aiokv: prefix index, block pools, block copies.";
    aiokv::bind_errors(m);
    aiokv::bind_copy(m);
    aiokv::bind_core(m);
#ifdef AIOKV_HAS_CUDA
    aiokv::bind_cuda(m);
#endif
}
