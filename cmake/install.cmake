# The same layout in a wheel (below the package folder) and in a prefix: include/, lib/, lib/cmake/quire/.
include(CMakePackageConfigHelpers)

install(TARGETS quire LIBRARY DESTINATION lib)
install(DIRECTORY src/quire DESTINATION include FILES_MATCHING PATTERN "*.h" PATTERN cpu EXCLUDE PATTERN cuda EXCLUDE)
if(TARGET quire_cuda)
  install(TARGETS quire_cuda LIBRARY DESTINATION lib)
endif()
set(QUIRE_MORE_OPERATORS "" CACHE STRING "Folders torch-X.Y that builds for other versions of PyTorch made: installed too")
foreach(folder ${QUIRE_MORE_OPERATORS})
  install(DIRECTORY ${folder} DESTINATION lib USE_SOURCE_PERMISSIONS)
endforeach()

write_basic_package_version_file(${PROJECT_BINARY_DIR}/quireConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/quireConfig.cmake ${PROJECT_BINARY_DIR}/quireConfigVersion.cmake DESTINATION lib/cmake/quire)
