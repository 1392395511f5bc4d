# How CUDA sources are compiled, in one place. nvcc is called by commands of its own: as a language of the project, CMake
# would demand it of everyone who configures.
set(QUIRE_CUDA auto CACHE STRING "libquire_cuda: auto (where nvcc is found), require or off")
find_program(QUIRE_NVCC nvcc HINTS /usr/local/cuda/bin)
if(QUIRE_NVCC)
  cmake_path(GET QUIRE_NVCC PARENT_PATH folder)
  find_path(QUIRE_CUDA_INCLUDE cuda.h HINTS ${folder}/../targets/x86_64-linux/include ${folder}/../include)
endif()
if(QUIRE_CUDA STREQUAL "require" AND NOT QUIRE_CUDA_INCLUDE)
  message(FATAL_ERROR "quire: QUIRE_CUDA=require, and nvcc with its header cuda.h is not on PATH or in "
                      "/usr/local/cuda/bin. Install CUDA 13.0, or configure with -DQUIRE_CUDA=off.")
endif()
set(QUIRE_HAS_NVCC OFF)
if(QUIRE_CUDA_INCLUDE AND NOT QUIRE_CUDA STREQUAL "off" AND NOT CMAKE_CROSSCOMPILING)
  set(QUIRE_HAS_NVCC ON)
endif()

# constexpr functions of the core are device code too. Without -fmad=false ptxas may fuse a multiplication and an addition,
# which then round once: other bytes than on the CPU.
set(QUIRE_NVCC_FLAGS -std=c++20 --expt-relaxed-constexpr -fmad=false -ccbin ${CMAKE_CXX_COMPILER})
# Kernels that use nothing of one chip: PTX of the oldest, which ptxas assembles for each, and which newer ones than
# these assemble themselves. The emulator runs this PTX.
set(QUIRE_CHIPS sm_80,sm_89,sm_90,sm_100,sm_103,sm_120,compute_80)

# quire_nvcc(OUTPUT SOURCE FLAGS...): what nvcc makes of a source, with includes that start at src/ and tests/.
function(quire_nvcc output source)
  cmake_path(GET output FILENAME name)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${QUIRE_NVCC} ${QUIRE_NVCC_FLAGS} ${ARGN} -I ${PROJECT_SOURCE_DIR}/src -I ${PROJECT_SOURCE_DIR}/tests -MD -MF
            ${output}.d -MT ${output} ${source} -o ${output}
    DEPENDS ${source}
    DEPFILE ${output}.d
    COMMENT "Compiling ${name}"
    VERBATIM)
endfunction()

# quire_ptx(OUTPUT SOURCE CHIP FLAGS...): PTX for a compute capability such as 80, in the current folder of the build.
function(quire_ptx output source chip)
  quire_nvcc(${CMAKE_CURRENT_BINARY_DIR}/${output} ${CMAKE_CURRENT_SOURCE_DIR}/${source} -gencode
             arch=compute_${chip},code=compute_${chip} ${ARGN} -ptx)
endfunction()
