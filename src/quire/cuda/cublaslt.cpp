#include "quire/cuda/cublaslt.h"

#include <dlfcn.h>

#include <type_traits>

#include "quire/base/lazy.h"

namespace quire::cuda::lt {
namespace {

void* open_library() {
  // One that is loaded comes first, whichever version it has: it is the one that PyTorch was built for.
  for (const int how : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL})
    for (const char* const name : {"libcublasLt.so.13", "libcublasLt.so.12"})
      if (void* const found = dlopen(name, how)) return found;
  return nullptr;
}

struct Library {
  Functions functions{};
  bool complete = false;

  Library() {
    void* const handle = open_library();
    complete = handle != nullptr;
    const auto get = [&](auto& function, const char* name) {
      function =
          complete ? reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name)) : nullptr;
      complete = function != nullptr;
    };
    Functions& f = functions;
    get(f.GetVersion, "cublasLtGetVersion"), get(f.Create, "cublasLtCreate");
    get(f.MatmulDescCreate, "cublasLtMatmulDescCreate"), get(f.MatmulDescDestroy, "cublasLtMatmulDescDestroy");
    get(f.MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute");
    get(f.MatrixLayoutCreate, "cublasLtMatrixLayoutCreate"), get(f.MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy");
    get(f.MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate");
    get(f.MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy");
    get(f.MatmulPreferenceSetAttribute, "cublasLtMatmulPreferenceSetAttribute");
    get(f.MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic"), get(f.Matmul, "cublasLtMatmul");
  }
};

}  // namespace

const Functions* find() {
  static constinit Lazy<const Library> library;
  const Library& found = library.get([] { return Library(); });
  return found.complete ? &found.functions : nullptr;
}

}  // namespace quire::cuda::lt
