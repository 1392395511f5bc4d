// PyTorch's operators that make, copy and view memory. fallback.cpp has the others.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "backend/backend.h"

namespace testdevice {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void copy(Launch launch, const at::Tensor& to, const at::Tensor& from) {
  std::move(launch).run([to, from] {
    const at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor(to).copy_(from);
  });
}

/// Of pageable memory, which is staged: the host may go on.
void copy_from_host(const at::Tensor& to, const at::Tensor& from) {
  refuse_in_capture("a copy from the host");
  count("copy host to device");
  Launch launch("copy from host", stream_of(to));
  const at::Tensor there = shadow(launch, to, Use::writes);
  copy(std::move(launch), there, from.clone());
}

/// The values of a device tensor, when all before on its stream has run.
at::Tensor on_host(const at::Tensor& from) {
  const at::Tensor staged = at::empty(from.sizes(), from.options().device(at::kCPU).requires_grad(false));
  Launch launch("copy to host", stream_of(from));
  const at::Tensor there = shadow(launch, from, Use::reads);
  copy(std::move(launch), staged, there);
  synchronize(stream_of(from));
  return staged;
}

/// Between devices both current streams wait for each other.
void copy_on_device(const at::Tensor& to, const at::Tensor& from) {
  const Place source = stream_of(from), target = stream_of(to);
  const bool crosses = source.device != target.device;
  const auto wait = [&](Place waits, Place before) {
    if (!crosses) return;
    Event event;
    event.record(before);
    event.block(waits);
  };
  if (crosses) count("copy device to device");
  wait(target, source);
  Launch launch("copy", target);
  const at::Tensor there = shadow(launch, to, Use::writes), here = shadow(launch, from, Use::copies_from);
  copy(std::move(launch), there, here);
  wait(source, target);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool /*non_blocking*/) {
  if (to.numel() == 0) return to;
  const at::Tensor source = from.expand_as(to);
  if (from.is_cpu()) {
    copy_from_host(to, source);
  } else if (to.is_cpu()) {
    refuse_in_capture("a copy to the host");
    count("copy device to host");
    at::Tensor(to).copy_(on_host(source));
  } else {
    copy_on_device(to, source);
  }
  return to;
}

at::Scalar local_scalar(const at::Tensor& t) {
  refuse_in_capture("item()");
  count("item");
  return on_host(t).item();
}

const at::Tensor& resize(const at::Tensor& t, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (t.sizes() == size) return t;  // with its strides, as on other devices
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t bytes =
      at::detail::computeStorageNbytesContiguous(size, t.element_size(), static_cast<size_t>(t.storage_offset()));
  if (bytes > t.storage().nbytes()) resize_storage(t.storage(), bytes);
  return t;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using at::Device, at::IntArrayRef, at::Layout, at::MemoryFormat, at::ScalarType, at::Storage, at::Tensor;
  using std::optional;
  m.impl("empty.memory_format",
         [](IntArrayRef size, optional<ScalarType> dtype, optional<Layout>, optional<Device> device, optional<bool>,
            optional<MemoryFormat> format) -> Tensor {
           const c10::DeviceGuard guard(c10::device_or_default(device));
           return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
         });
  m.impl("empty_strided",
         [](IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype, optional<Layout>, optional<Device> device,
            optional<bool>) -> Tensor {
           const c10::DeviceGuard guard(c10::device_or_default(device));
           return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype));
         });
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", [](const Tensor& from, const Tensor& to) {
    at::Tensor(to).resize_(from.sizes());
    return copy_from(from, to, false);
  });
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", [](Tensor& t, Storage s) -> Tensor& { return at::native::set_(t, s); });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& t, Storage s, int64_t offset, IntArrayRef size, IntArrayRef stride) -> Tensor& {
           return at::native::set_storage_cpu_(t, s, offset, size, stride);
         });
  m.impl("record_stream",
         [](Tensor& t, c10::Stream s) { record_stream(t.storage().mutable_data(), {s.device_index(), s.id()}); });
}

/// Kernels of the CPU copy tensors that PyTorch has only marked as negated or conjugated.
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

at::Tensor shadow(Launch& launch, const at::Tensor& t, Use use) {
  const auto address = [&]() -> const void* {
    if (t.numel() == 0) return nullptr;
    if (use == Use::writes) return launch(t.mutable_data_ptr());
    return use == Use::reads ? launch(t.const_data_ptr()) : launch.from_peer(t.const_data_ptr());
  };
  const auto options = t.options().device(at::kCPU).requires_grad(false);
  const at::Tensor there = at::from_blob(const_cast<void*>(address()), t.sizes(), t.strides(), options);
  there._set_conj(t.is_conj());
  there._set_neg(t.is_neg());
  return there;
}

}  // namespace testdevice
