# The swap engine of NVIDIA GPUs. Layout and planner are plain C++ and always built; the rest needs
# a CUDA compiler (12 or 13), and without one everything else builds and works.
add_library(aiokv_cuda_plan STATIC
    src/cuda/layout.cpp
    src/cuda/planner.cpp)
list(APPEND AIOKV_LIBRARIES aiokv_cuda_plan)

option(AIOKV_CUDA "Build the CUDA device when a CUDA compiler is found" ON)
set(AIOKV_HAS_CUDA OFF)
if(AIOKV_CUDA)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
        set(AIOKV_HAS_CUDA ON)
    else()
        message(STATUS "aiokv: no CUDA compiler, building without the CUDA device")
    endif()
endif()

if(AIOKV_HAS_CUDA)
    set(AIOKV_CUDA_DEFAULTS OFF)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
        set(AIOKV_CUDA_DEFAULTS ON)
        set(CMAKE_CUDA_ARCHITECTURES 80)
    endif()
    enable_language(CUDA)
    if(AIOKV_CUDA_DEFAULTS)
        # Machine code for what exists; the last one also as PTX, for what comes after.
        set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90)
        if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
            set(CMAKE_CUDA_ARCHITECTURES 80-real 86-real 89-real 90-real 100-real 120)
        endif()
    endif()
    # CMake up to 3.25.1 knows no flag for C++20 in CUDA sources; every nvcc from 12.0 on takes it.
    foreach(kind STANDARD EXTENSION)
        if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
            set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
        endif()
    endforeach()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    find_package(CUDAToolkit REQUIRED)
    # Not part of `all`: the native unit tests have no GPU, only the extension module links it.
    add_library(aiokv_cuda STATIC EXCLUDE_FROM_ALL
        src/cuda/direct.cu
        src/cuda/engine.cpp
        src/cuda/events.cpp
        src/cuda/gather.cu
        src/cuda/host_copies.cpp
        src/cuda/id_buffer.cpp
        src/cuda/lane.cpp
        src/cuda/registration.cpp
        src/cuda/scatter.cu
        src/cuda/slots.cpp
        src/cuda/swap_blocks.cpp
        src/cuda/slots.cu
        src/cuda/transfer.cpp
        src/cuda/upload.cu)
    # Static: CuPy, Paddle and PyTorch bring runtimes of their own; they share the primary context.
    target_link_libraries(aiokv_cuda PUBLIC aiokv_cuda_plan CUDA::cudart_static Threads::Threads)
    set_target_properties(aiokv_cuda PROPERTIES INTERPROCEDURAL_OPTIMIZATION OFF)
    list(APPEND AIOKV_LIBRARIES aiokv_cuda)
endif()
