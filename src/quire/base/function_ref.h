// A callback that its caller owns: nothing is copied or allocated, whatever it captures.
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace quire {

template <class Signature>
class FunctionRef;

/// Refers to a callable object for as long as the object lives: for parameters of functions that call it before they
/// return.
template <class R, class... Args>
class FunctionRef<R(Args...)> {
 public:
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, FunctionRef> && std::is_invocable_r_v<R, F&, Args...>)
  FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))), call_([](void* object, Args... args) {
          return static_cast<R>(std::invoke(*static_cast<std::remove_reference_t<F>*>(object), args...));
        }) {}

  R operator()(Args... args) const { return call_(object_, args...); }

 private:
  void* object_;
  R (*call_)(void*, Args...);
};

}  // namespace quire
