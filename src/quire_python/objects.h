// What of PyTorch's Python objects the binding reads: its own headers do not compile under Python's limited API.
// objects.cpp compares.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

extern PyObject* THPVariableClass;  ///< torch.Tensor
extern PyObject* ParameterClass;    ///< torch.nn.Parameter
extern PyTypeObject THPDtypeType;   ///< torch.dtype

/// A new reference to the object of a tensor; null with a Python error set where there is none.
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);

namespace quire_python {

struct TensorObject {
  PyObject_HEAD at::Tensor tensor;
};

struct DtypeObject {
  PyObject_HEAD at::ScalarType dtype;
};

}  // namespace quire_python
