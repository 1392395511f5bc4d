# How CUDA sources are compiled, in one place. nvcc is called by commands of its own: as a language of the project, CMake
# would demand it of everyone who configures.
find_program(QUIRE_NVCC nvcc HINTS /usr/local/cuda/bin)

# constexpr functions of the core are device code too. Without -fmad=false ptxas may fuse a multiplication and an addition,
# which then round once: other bytes than on the CPU.
set(QUIRE_NVCC_FLAGS -std=c++20 --expt-relaxed-constexpr -fmad=false -ccbin ${CMAKE_CXX_COMPILER})
set(QUIRE_NVCC_ARCHITECTURES -gencode arch=compute_90a,code=sm_90a)

# quire_ptx(OUTPUT SOURCE FLAGS...): PTX of a source with includes that start at src/ and tests/, in the build folder.
function(quire_ptx output source)
  set(ptx ${CMAKE_CURRENT_BINARY_DIR}/${output})
  add_custom_command(
    OUTPUT ${ptx}
    COMMAND ${QUIRE_NVCC} ${QUIRE_NVCC_FLAGS} ${QUIRE_NVCC_ARCHITECTURES} ${ARGN} -I ${PROJECT_SOURCE_DIR}/src -I
            ${PROJECT_SOURCE_DIR}/tests -MD -MF ${ptx}.d -MT ${ptx} -ptx ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${ptx}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${source}
    DEPFILE ${ptx}.d
    COMMENT "Compiling ${source} to ${output}"
    VERBATIM)
endfunction()
