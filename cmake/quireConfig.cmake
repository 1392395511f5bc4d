# find_package(quire): quire::quire, the core, and quire::quire_torch, the PyTorch operators for C++ programs.
# A program that links the latter calls find_package(Torch) before: it is PyTorch's libraries that the operators register
# with, and they are there for each minor version of PyTorch apart.
get_filename_component(_quire_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

add_library(quire::quire SHARED IMPORTED)
set_target_properties(quire::quire PROPERTIES IMPORTED_LOCATION "${_quire_prefix}/lib/libquire.so")
target_include_directories(quire::quire INTERFACE "${_quire_prefix}/include")
target_compile_features(quire::quire INTERFACE cxx_std_20)

# The operators for the PyTorch that was found; or the only ones.
file(GLOB _quire_operators RELATIVE "${_quire_prefix}/lib" "${_quire_prefix}/lib/torch-*")
list(LENGTH _quire_operators _quire_count)
if(Torch_FOUND)
  string(REGEX REPLACE "^([0-9]+\\.[0-9]+).*" "torch-\\1" _quire_fitting "${Torch_VERSION}")
elseif(_quire_count EQUAL 1)
  set(_quire_fitting "${_quire_operators}")
else()
  set(_quire_fitting "")
endif()
if(_quire_fitting IN_LIST _quire_operators)
  # Operators are found by name at run time: no symbol refers to them, so a linker with --as-needed would drop the library.
  # PyTorch's libraries stay with it, because it is the program that knows where they are.
  add_library(quire::quire_torch INTERFACE IMPORTED)
  target_link_libraries(
    quire::quire_torch INTERFACE "-Wl,--push-state,--no-as-needed" "${_quire_prefix}/lib/${_quire_fitting}/libquire_torch.so"
                                 torch_cpu c10 "-Wl,--pop-state" quire::quire)
elseif(_quire_operators)
  message(STATUS "quire: there is no target quire::quire_torch. Its operators are here for ${_quire_operators}; the version "
                 "of a find_package(Torch) before find_package(quire) chooses, which is '${Torch_VERSION}'.")
endif()
unset(_quire_prefix)
unset(_quire_operators)
unset(_quire_count)
unset(_quire_fitting)
