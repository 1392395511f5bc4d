# The PyTorch to build against: the targets torch_cpu, torch_python, c10 and torch_openmp, and TORCH_VERSION. Which one
# that is tools/torch_pin.py says. Not find_package(Torch): with a CUDA build of PyTorch that insists on a CUDA toolkit,
# which nothing here needs.
set(QUIRE_TORCH_ROOT "" CACHE PATH "The folder `torch` of a PyTorch to build against, instead of Python_EXECUTABLE's")
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/torch_pin.py ${QUIRE_TORCH_ROOT}
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE said RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "${said}Install one there, name another Python with -DPython_EXECUTABLE=..., or build the core "
                      "alone with -DQUIRE_TORCH=OFF.")
endif()
list(GET found 0 TORCH_VERSION)
list(GET found 1 torch_root)
message(STATUS "PyTorch ${TORCH_VERSION} in ${torch_root}")

# Where the operators for this minor version lie, in the build tree as in an installation, which may have several.
string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor ${TORCH_VERSION})
set(QUIRE_OPERATORS lib/torch-${minor})

foreach(name torch_cpu torch_python c10)
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES IMPORTED_LOCATION ${torch_root}/lib/lib${name}.so)
  target_include_directories(${name} SYSTEM INTERFACE ${torch_root}/include ${torch_root}/include/torch/csrc/api/include)
endforeach()

# The OpenMP runtime that PyTorch brings along: a second one would be a second pool of threads.
file(GLOB openmp ${torch_root}/lib/libgomp*.so* ${torch_root}/../torch.libs/libgomp*.so*)
if(NOT openmp)
  set(openmp gomp)
endif()
add_library(torch_openmp INTERFACE)
list(GET openmp 0 openmp)
target_link_libraries(torch_openmp INTERFACE ${openmp})
