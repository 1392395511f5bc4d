// Operators as functions of Python that go past PyTorch's binding and its dispatcher, which cost more than the kernel
// of a small product. A call returns None where a mode, a tracer or a hook has to see it, and where it fails. The
// caller then calls the operator itself, which also raises the error.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>

#include "quire/base/fault.h"
#include "quire_python/objects.h"
#include "quire_torch/ops/grouped_linear.h"
#include "quire_torch/ops/permute.h"
#include "quire_torch/ops/pointwise.h"
#include "quire_torch/ops/route.h"

namespace quire_torch::op::detail {

/// library.cpp, which registers these operators, has them.
extern template Results<GroupedLinear> record<GroupedLinear>(const GroupedLinear::Args& a);
extern template Results<Activation> record<Activation>(const Activation::Args& a);
extern template Results<Route> record<Route>(const Route::Args& a);
extern template Results<Permute> record<Permute>(const Permute::Args& a);
extern template Results<Unpermute> record<Unpermute>(const Unpermute::Args& a);

}  // namespace quire_torch::op::detail

namespace quire_python {
namespace {

namespace op = quire_torch::op;

/// The tensor of a torch.Tensor or torch.nn.Parameter. Null for all else, subclasses included.
const at::Tensor* tensor_of(PyObject* o) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(o));
  if (type != THPVariableClass && type != ParameterClass) return nullptr;
  const at::Tensor& t = reinterpret_cast<TensorObject*>(o)->tensor;
  return t.defined() ? &t : nullptr;
}

template <class T>
bool read(PyObject* o, T& to);

/// read() of a list or a tuple.
template <class List>
bool read_list(PyObject* o, List& to) {
  const bool tuple = Py_TYPE(o) == &PyTuple_Type;
  if (!tuple && Py_TYPE(o) != &PyList_Type) return false;
  to.resize(static_cast<size_t>(tuple ? PyTuple_Size(o) : PyList_Size(o)));
  for (size_t i = 0; i < to.size(); ++i) {
    const auto at = static_cast<Py_ssize_t>(i);
    if (!read(tuple ? PyTuple_GetItem(o, at) : PyList_GetItem(o, at), to[i])) return false;
  }
  return true;
}

/// read() of a number that is not negative, as those are that operators take.
template <class Int>
bool read_number(PyObject* o, Int& to) {
  int beyond = 0;
  const int64_t number = Py_TYPE(o) == &PyLong_Type ? PyLong_AsLongLongAndOverflow(o, &beyond) : -1;
  to = number;
  return number >= 0 && beyond == 0;
}

/// Whether the object is of the field's kind, and `to` has now its value. None for a tensor that the operator writes:
/// what fails is called again.
template <class T>
bool read(PyObject* o, T& to) {
  if constexpr (op::OneOf<T, at::Tensor, op::OptionalTensor>) {
    if (std::same_as<T, op::OptionalTensor> && o == Py_None) return true;
    const at::Tensor* const t = tensor_of(o);
    if (t) to = *t;
    return t != nullptr;
  } else if constexpr (op::Written<T>) {
    return o == Py_None;
  } else if constexpr (std::same_as<T, op::GradientList>) {
    return read(o, to.tensors);
  } else if constexpr (op::OneOf<T, op::TensorList, op::OptionalTensorList>) {
    return read_list(o, to);
  } else if constexpr (op::Textual<T>) {
    Py_ssize_t size = 0;
    const char* const text = Py_TYPE(o) == &PyUnicode_Type ? PyUnicode_AsUTF8AndSize(o, &size) : nullptr;
    if (!text) return PyErr_Clear(), false;
    to = T::parse({text, static_cast<size_t>(size)});
    return true;
  } else if constexpr (std::same_as<T, bool>) {
    to = o == Py_True;
    return to || o == Py_False;
  } else if constexpr (op::OneOf<T, int64_t, c10::SymInt>) {
    return read_number(o, to);
  } else {
    static_assert(std::same_as<T, at::ScalarType>, "a kind of field that this binding does not read");
    if (Py_TYPE(o) != &THPDtypeType) return false;
    to = reinterpret_cast<DtypeObject*>(o)->dtype;
    return true;
  }
}

/// What a function is called with: `count` objects by position, and behind them those that `names` names.
struct Given {
  PyObject* const* objects;
  Py_ssize_t count;
  PyObject* names;

  Py_ssize_t named() const { return names ? PyTuple_Size(names) : 0; }
  /// The object for a field at that position of the schema, null if there is none.
  PyObject* find(Py_ssize_t position, const char* name) const {
    if (position < count) return objects[position];
    for (Py_ssize_t i = 0; i < named(); ++i)
      if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, i), name) == 0) return objects[count + i];
    return nullptr;
  }
};

/// Whether every object belongs to a field, whose kind it is, and every field without an object has a default.
template <class Args>
bool read_all(const Given& given, Args& args) {
  Py_ssize_t position = 0, used = 0;
  bool fits = true;
  op::for_each_field<Args>([&](auto field) {
    PyObject* const o = given.find(position++, field.name);
    used += o != nullptr;
    fits = fits && (o ? read(o, args.*(field.kMember)) : field.fallback != nullptr);
  });
  return fits && used == given.count + given.named();
}

class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

/// The results of a call that nobody but the kernel and autograd has to see, undefined for others. A hook on saved
/// tensors may raise, as a checkpoint does to end a recomputation, and must not run again when the caller tries again.
template <class Op>
op::Results<Op> computed(const typename Op::Args& args) {
  const op::detail::Before before = op::detail::before_kernel(args, op::detail::kAnyDevice);
  if (before == op::detail::Before::dispatcher) return {};
  if (before == op::detail::Before::nobody) {
    const WithoutGil released;
    return Op::inference(args);
  }
  if constexpr (requires { typename Op::Saved; }) {
    if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return {};
    const WithoutGil released;
    return op::detail::record<Op>(args);
  }
  return {};
}

/// One result as it is, several as a tuple.
template <size_t N>
PyObject* wrapped(op::Tensors<N>&& results) {
  if constexpr (N == 1) return THPVariable_Wrap(std::move(results[0]));
  PyObject* const tuple = PyTuple_New(N);
  for (size_t i = 0; tuple && i < N; ++i) {
    PyObject* const one = THPVariable_Wrap(std::move(results[i]));
    if (!one || PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), one) != 0) return Py_DECREF(tuple), nullptr;
  }
  return tuple;
}

/// Called with the operator's arguments -> its results, or None. Raises what an earlier kernel has found, which is told
/// once only.
template <class Op>
PyObject* direct(PyObject*, PyObject* const* objects, Py_ssize_t count, PyObject* names) {
  op::Results<Op> results;
  try {
    typename Op::Args args{};
    if (!at::impl::torch_function_mode_enabled() && read_all({objects, count, names}, args))
      results = computed<Op>(args);
  } catch (const quire::FaultError& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  } catch (const std::exception&) {
    results[0].reset();
  }
  if (results[0].defined()) return wrapped(std::move(results));
  Py_INCREF(Py_None);
  return Py_None;
}

template <class Op>
PyMethodDef method() {
  return {Op::kName, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&direct<Op>)), METH_FASTCALL | METH_KEYWORDS,
          nullptr};
}

PyMethodDef methods[] = {method<quire_torch::Linear>(),
                         method<quire_torch::LinearPrequantized>(),
                         method<quire_torch::GroupedLinear>(),
                         method<quire_torch::Activation>(),
                         method<quire_torch::Route>(),
                         method<quire_torch::ExpertRows>(),
                         method<quire_torch::Permute>(),
                         method<quire_torch::Unpermute>(),
                         {}};
PyModuleDef module{PyModuleDef_HEAD_INIT, "quire_python", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace quire_python

PyMODINIT_FUNC PyInit_quire_python() { return PyModule_Create(&quire_python::module); }
