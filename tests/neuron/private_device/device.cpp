// A device of torch's key PrivateUse1 whose tensors lie in the host's memory, and which the host may not read.
//
// Every operator runs as the CPU's, on CPU tensors over the same memory; results become tensors of the device. Only
// copies between devices have a kernel of their own.

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/library.h>

namespace {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;

// The memory of a storage, which is kept alive, as memory of a device.
c10::DataPtr memory_of(const c10::Storage& storage, c10::Device device) {
  auto keep = [](void* owner) { delete static_cast<c10::Storage*>(owner); };
  return c10::DataPtr(storage.mutable_data(), new c10::Storage(storage), keep, device);
}

c10::Storage alias(const c10::Storage& storage, c10::Device device) {
  auto* allocator = c10::GetAllocator(c10::kCPU);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), memory_of(storage, device), allocator, true);
}

at::Tensor over(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor : over(alias(tensor.storage(), c10::kCPU), tensor, c10::DispatchKey::CPU);
}

// Tensors of the device that an operator was given, with what stands for them on the host.
struct Given {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;

  at::Tensor lend(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != DEVICE) return tensor;
    for (auto& [own, host] : pairs)
      if (own.is_same(tensor)) return host;
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  }

  // Gives storages that the operator made larger to the device's tensors.
  void keep_resized() {
    for (auto& [own, host] : pairs) {
      if (own.storage().data() == host.storage().data()) continue;
      auto* storage = own.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(memory_of(host.storage(), c10::Device(DEVICE, 0)));
      storage->set_nbytes(host.storage().nbytes());
    }
  }

  at::Tensor take(const at::Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (auto& [own, host] : pairs) {
      if (host.is_same(result)) {
        own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
        return own;
      }
    }
    for (auto& [own, host] : pairs)  // A view of what the operator was given.
      if (host.storage().is_alias_of(result.storage())) return over(own.storage(), result, c10::DispatchKey::PrivateUse1);
    return over(alias(result.storage(), c10::Device(DEVICE, 0)), result, c10::DispatchKey::PrivateUse1);
  }
};

template <class Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> each : value.toOptionalTensorList())
      list.push_back(each ? std::optional(change(*each)) : each);
    return list;
  }
  return value;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Given given;
  const auto num_arguments = op.schema().arguments().size();
  for (auto& value : torch::jit::last(*stack, num_arguments)) {
    const bool names_device = value.isDevice() && value.toDevice().type() == DEVICE;
    auto& slot = const_cast<c10::IValue&>(value);
    slot = names_device ? c10::IValue(c10::Device(c10::kCPU))
                        : changed(value, [&](const at::Tensor& each) { return given.lend(each); });
  }
  op.callBoxed(stack);
  given.keep_resized();
  for (auto& value : torch::jit::last(*stack, op.schema().returns().size()))
    const_cast<c10::IValue&>(value) = changed(value, [&](const at::Tensor& each) { return given.take(each); });
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

// What torch.accelerator asks for memory: 8 of 16 GiB are free, whatever was allocated.
struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    c10::DataPtr memory = c10::GetAllocator(c10::kCPU)->allocate(num_bytes);
    memory.unsafe_set_device(c10::Device(DEVICE, 0));
    return memory;
  }
  void copy_data(void* target, const void* source, size_t count) const override { default_copy_data(target, source, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {8ull << 30, 16ull << 30}; }
};

Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("_copy_from", &copy_from); }

}  // namespace
