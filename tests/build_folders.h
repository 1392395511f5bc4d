// Where the build that these tests are of has its files.
#pragma once

namespace quire::testing {

extern const char* const kGoldenFolder;  // the golden vectors
extern const char* const kPtxFolder;     // what nvcc has made for the emulator
extern const char* const kFatbinFolder;  // the modules of libquire_cuda, and what ptxas says of them

}  // namespace quire::testing
