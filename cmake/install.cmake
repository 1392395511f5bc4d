# The same layout in a wheel (below the package folder) and in a prefix: include/, lib/, lib/cmake/quire/.
include(CMakePackageConfigHelpers)

install(TARGETS quire LIBRARY DESTINATION lib)
install(DIRECTORY src/quire DESTINATION include FILES_MATCHING PATTERN "*.h" PATTERN cpu EXCLUDE PATTERN cuda EXCLUDE)
if(TARGET quire_cuda)
  install(TARGETS quire_cuda LIBRARY DESTINATION lib)
endif()
if(QUIRE_TORCH)
  install(TARGETS quire_torch LIBRARY DESTINATION lib)
  install(FILES ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/build.json DESTINATION lib)
endif()

write_basic_package_version_file(${PROJECT_BINARY_DIR}/quireConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/quireConfig.cmake ${PROJECT_BINARY_DIR}/quireConfigVersion.cmake DESTINATION lib/cmake/quire)
