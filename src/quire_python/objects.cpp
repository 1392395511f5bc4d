#include "quire_python/objects.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <concepts>
#include <cstddef>

namespace quire_python {

static_assert(std::same_as<decltype(THPVariable::cdata), decltype(TensorObject::tensor)> &&
                  offsetof(THPVariable, cdata) == offsetof(TensorObject, tensor),
              "this PyTorch keeps a tensor elsewhere in its Python object");
static_assert(std::same_as<decltype(THPDtype::scalar_type), decltype(DtypeObject::dtype)> &&
                  offsetof(THPDtype, scalar_type) == offsetof(DtypeObject, dtype),
              "this PyTorch keeps a dtype elsewhere in its Python object");

}  // namespace quire_python
