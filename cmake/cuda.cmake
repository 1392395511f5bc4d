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
# Chips that kernels are assembled for; newer ones assemble the PTX beside them.
set(QUIRE_CHIPS 80 89 90 100 103 120 CACHE STRING "libquire_cuda: chips that kernels are assembled for, such as 80 and 90")
# Modules that have code of their own for chips from 8.9 on, with instructions that older ones lack.
set(QUIRE_MODULES_OF_89 tiles_fp4 tiles_fp8)

# A command that starts nvcc. ccache keeps what nvcc makes, as it does for C++, if -c is among the options, which changes
# nothing beside -fatbin or -ptx. It compares the files that nvcc has read (CCACHE_DEPEND): for several chips `nvcc -E`
# shows what one of them compiles, and a change for another one would go unnoticed. It does not compare the folder of the
# build (CCACHE_NOHASHDIR). nvcc is asked for its version, because the one on PATH may be a script.
set(QUIRE_NVCC_CALL ${QUIRE_NVCC})
if(QUIRE_CCACHE)
  set(QUIRE_NVCC_CALL ${CMAKE_COMMAND} -E env CCACHE_DEPEND=1 CCACHE_NOHASHDIR=1 "CCACHE_COMPILERCHECK=%compiler% --version"
      ${QUIRE_CCACHE_CALL} ${QUIRE_NVCC} -c)
endif()

# quire_nvcc(OUTPUT SOURCE FLAGS...): what nvcc makes of a source, with includes that start at src/ and tests/, in the
# current folder of the build. OUTPUT.ptxas holds what ptxas says of each kernel.
function(quire_nvcc output source)
  cmake_path(GET output FILENAME name)
  set(script ${PROJECT_SOURCE_DIR}/cmake/nvcc.sh)
  add_custom_command(
    OUTPUT ${output}
    BYPRODUCTS ${output}.ptxas
    COMMAND ${script} ${output} ${QUIRE_NVCC_CALL} ${QUIRE_NVCC_FLAGS} -Xptxas -v ${ARGN} -I ${PROJECT_SOURCE_DIR}/src -I
            ${PROJECT_SOURCE_DIR}/tests -MD -MF ${output}.d -MT ${name} ${source} -o ${output}
    DEPENDS ${source} ${script}
    DEPFILE ${output}.d
    COMMENT "Compiling ${name}"
    VERBATIM)
endfunction()

# quire_fatbin(OUTPUT SOURCE NAME): one binary for all chips, of a module. Each chip gets the newest code that it runs. By
# --compress-mode=size it is a third as large. Drivers from CUDA 12.4 on read that, and machine code of CUDA 13 demands one
# of CUDA 13 anyway.
function(quire_fatbin output source module)
  set(newest 80)
  if(module IN_LIST QUIRE_MODULES_OF_89)
    set(newest 89)
  endif()
  foreach(chip ${QUIRE_CHIPS})
    set(from 80)
    if(chip GREATER_EQUAL 89)
      set(from ${newest})
    endif()
    list(APPEND code_${from} sm_${chip})
  endforeach()
  list(APPEND code_${newest} compute_${newest})
  foreach(from 80 89)
    if(code_${from})
      list(JOIN code_${from} "," code)
      list(APPEND flags -gencode arch=compute_${from},code=[${code}])
    endif()
  endforeach()
  quire_nvcc(${output} ${source} -O3 ${flags} --compress-mode=size -fatbin)
endfunction()

# quire_ptx(OUTPUT SOURCE CAPABILITY FLAGS...): PTX for a compute capability such as 80, in the current folder of the build.
function(quire_ptx output source capability)
  quire_nvcc(${CMAKE_CURRENT_BINARY_DIR}/${output} ${CMAKE_CURRENT_SOURCE_DIR}/${source} -gencode
             arch=compute_${capability},code=compute_${capability} ${ARGN} -ptx)
endfunction()
