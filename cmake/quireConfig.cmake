# find_package(quire): quire::quire, the core, and quire::quire_torch, the PyTorch operators for C++ programs.
# A program that links the latter calls find_package(Torch) too: it is PyTorch's libraries that the operators register with.
get_filename_component(_quire_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

add_library(quire::quire SHARED IMPORTED)
set_target_properties(quire::quire PROPERTIES IMPORTED_LOCATION "${_quire_prefix}/lib/libquire.so")
target_include_directories(quire::quire INTERFACE "${_quire_prefix}/include")
target_compile_features(quire::quire INTERFACE cxx_std_20)

if(EXISTS "${_quire_prefix}/lib/libquire_torch.so")
  # Operators are found by name at run time: no symbol refers to them, so a linker with --as-needed would drop the library.
  # PyTorch's libraries stay with it, because it is the program that knows where they are.
  add_library(quire::quire_torch INTERFACE IMPORTED)
  target_link_libraries(
    quire::quire_torch INTERFACE "-Wl,--push-state,--no-as-needed" "${_quire_prefix}/lib/libquire_torch.so" torch_cpu
                                 c10 "-Wl,--pop-state" quire::quire)
endif()
unset(_quire_prefix)
