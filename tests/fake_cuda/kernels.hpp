// Kernels: those of the CPU, behind DispatchKey::CUDA.
//
// One boxed fallback serves every operator that torch does not take apart itself (as it does with norms). Its tensors become CPU tensors over the same
// memory, which hold nothing alive; the CPU's kernel runs on them, at once or late; what it made becomes a tensor of
// the device. To launch late, the shapes of the results must be known: kernels for meta tensors tell them.
#pragma once

#include "memory.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_map>

namespace fake {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

// -- scopes ----------------------------------------------------------------------------------------------------------

// What is below the backends of torch: no autograd, no autocast, no modes of Python, whatever the thread is inside.
inline const DispatchKeySet above =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
    DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PreDispatch,
                    DispatchKey::PythonDispatcher});
struct Below {
  // The guard of inference mode sets keys itself, so that they are excluded before and behind it.
  c10::impl::ExcludeDispatchKeyGuard first{above};
  c10::InferenceMode inference{false};
  c10::impl::ExcludeDispatchKeyGuard then{above};
};
struct InKernel {
  Below below;
  InKernel() { ++in_kernel; }
  ~InKernel() { --in_kernel; }
};

// -- tensors ---------------------------------------------------------------------------------------------------------

inline Tensor make(c10::Storage storage, DispatchKey key, const Tensor& like) {
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

using Storages = std::map<const void*, c10::Storage>;  // of the device's, as a kernel sees them
// The same memory as a kernel sees it.
inline Tensor seen(const Tensor& tensor, Storages& storages) {
  auto* own = tensor.storage().unsafeGetStorageImpl();
  auto it = storages.find(own);
  if (it == storages.end()) {
    size_t bytes = tensor.storage().nbytes();
    const void* data = tensor.storage().data();
    void* p = tensor.is_cuda() ? physical(data, bytes) : const_cast<void*>(data);
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(p, c10::Device(c10::kCPU)),
                         &host_allocator, true);
    it = storages.emplace(own, std::move(storage)).first;
  }
  return make(it->second, DispatchKey::CPU, tensor);
}

using Owners = std::map<const void*, Tensor>;  // of the storages that a kernel sees, the device's tensors
// What a kernel made, as a tensor of the device.
inline Tensor returned(const Tensor& made, const Owners& owners) {
  auto* storage = made.storage().unsafeGetStorageImpl();
  if (auto owner = owners.find(storage); owner != owners.end())
    return make(owner->second.storage(), DispatchKey::CUDA, made);
  size_t bytes = made.storage().nbytes();
  char* p = (char*)storage->mutable_data();
  auto& gpu = gpus[current_device];
  c10::DataPtr data;
  if (gpu.has_physical(p)) {
    storage->_mutable_data_ptr_no_checks().release_context();
    p = p - gpu.memory + gpu.addresses;
    data = {p, p, &DeviceAllocator::drop, c10::Device(c10::kCUDA, current_device)};
  } else {
    data = device_allocator.allocate(bytes);
    if (bytes) memcpy(physical(data.get(), bytes), p, bytes);
  }
  c10::Storage own(c10::Storage::use_byte_size_t(), bytes, std::move(data), &device_allocator, true);
  return make(std::move(own), DispatchKey::CUDA, made);
}

// Replaces every tensor in an argument or result by what `change` makes of it.
template <class Change>
void each_tensor(IValue& value, Change change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorList().copy();
    for (size_t i = 0; i < list.size(); ++i)
      if (Tensor tensor = list[i]; tensor.defined()) list[i] = change(tensor);
    value = list;
  } else if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i)
      if (IValue one = list.get(i); one.isTensor() && one.toTensor().defined())
        list.set(i, IValue(change(one.toTensor())));
    value = list;
  }
}

// -- random numbers --------------------------------------------------------------------------------------------------

inline at::Generator& generator(int device) {
  static std::vector<at::Generator> made(MOST_DEVICES);
  if (!made[device].defined()) made[device] = at::make_generator<at::CPUGeneratorImpl>(0);
  return made[device];
}
struct WithGenerator {  // random kernels of the CPU draw from the device's generator
  int device = current_device;
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  Tensor before = cpu.get_state();
  WithGenerator() { cpu.set_state(generator(device).get_state()); }
  ~WithGenerator() {
    generator(device).set_state(cpu.get_state());
    cpu.set_state(before);
  }
};

// -- operators -------------------------------------------------------------------------------------------------------

// They take indices on the host, as on a GPU.
inline const std::set<std::string> mixes_devices{"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_",
                                                 "aten::_unsafe_index.Tensor"};
// In 16 bits their statistics have another type on the CPU than meta kernels say.
inline const std::set<std::string> other_statistics{"aten::native_layer_norm", "aten::native_group_norm",
                                                    "aten::native_batch_norm", "aten::_fused_rms_norm"};

struct Operator {
  std::string name;
  std::vector<bool> writes;    // which arguments
  bool random = false;         // draws from the generator, whose state must be there when the host asks for it
  bool returns_written = true; // nothing but its arguments
  bool returns_views = false;
  bool returns_tensors = true; // nothing but new tensors
  bool only_torch = false;     // kernels of others may be written in Python, which cannot run under the driver's lock
  bool mixes = false, statistics = false;
  mutable std::atomic<bool> no_meta{false};

  explicit Operator(const c10::OperatorHandle& op) : name(c10::toString(op.operator_name())) {
    const auto& schema = op.schema();
    for (auto& argument : schema.arguments())
      writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    auto tags = op.getTags();
    random = std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
    for (auto& result : schema.returns()) {
      bool tensor = result.type()->kind() == c10::TypeKind::TensorType;
      bool written = result.alias_info() && result.alias_info()->isWrite();
      returns_written &= written && (tensor || result.type()->kind() == c10::TypeKind::ListType);
      returns_views |= result.alias_info() && !written;
      returns_tensors &= tensor && !result.alias_info();
    }
    returns_tensors &= !schema.returns().empty();
    only_torch = name.rfind("aten::", 0) == 0;
    mixes = mixes_devices.count(name), statistics = other_statistics.count(name);
  }
};
inline const Operator& about(const c10::OperatorHandle& op) {
  static std::unordered_map<const void*, std::unique_ptr<Operator>> known;
  Lock lock(driver);
  auto& found = known[&op.schema()];
  if (!found) found = std::make_unique<Operator>(op);
  return *found;
}

// The device that an operator runs on: that of its tensors, of a `device` argument, or the current one.
inline int device_for(const c10::OperatorHandle& op, std::vector<IValue>& args) {
  int device = -1;
  for (auto& arg : args)
    each_tensor(arg, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return tensor;
      TORCH_CHECK(device < 0 || device == tensor.get_device(),
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:", device,
                  " and cuda:", tensor.get_device(), "! (", op.operator_name(), ")");
      device = tensor.get_device();
      return tensor;
    });
  for (auto& arg : args)
    if (device < 0 && arg.isDevice() && arg.toDevice().is_cuda()) device = checked(arg.toDevice().index());
  return device < 0 ? current_device : device;
}

struct Call {
  const c10::OperatorHandle& op;
  const Operator& what;
  std::vector<IValue> given, args;                     // the device's tensors; as a kernel sees them
  Owners owners;
  std::vector<std::pair<Tensor, Tensor>> written;      // likewise
  bool any_empty = false, any_tensor = false, any_reduced = false;

  Call(const c10::OperatorHandle& op, const Operator& what, std::vector<IValue> stack)
      : op(op), what(what), given(std::move(stack)), args(given) {
    Storages storages;
    for (size_t i = 0; i < args.size(); ++i) {
      each_tensor(args[i], [&](const Tensor& tensor) {
        if (!tensor.is_cuda()) return from_host(tensor);
        any_tensor = true, any_reduced |= tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
        Tensor kernels = seen(tensor, storages);
        owners[kernels.storage().unsafeGetStorageImpl()] = tensor;
        if (what.writes[i]) written.emplace_back(tensor, kernels), any_empty |= tensor.numel() == 0;
        return kernels;
      });
      if (args[i].isDevice()) args[i] = c10::Device(c10::kCPU);
    }
  }
  // Numbers travel by value, and so do indices.
  Tensor from_host(const Tensor& tensor) const {
    TORCH_CHECK(tensor.dim() == 0 || what.mixes,
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", current_device,
                " and cpu! (", what.name, ")");
    Below below;
    Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }

  std::function<std::vector<IValue>()> kernel() const {
    return [op = op, args = args, random = what.random] {
      InKernel scope;
      std::unique_ptr<WithGenerator> drawing(random ? new WithGenerator : nullptr);
      auto stack = args;
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
      return stack;
    };
  }

  bool may_be_late() const {
    return order != Order::eager && what.only_torch && !what.random && !what.returns_views && any_tensor &&
           !in_kernel && !(what.statistics && any_reduced);
  }
  // Writes to its arguments and returns them.
  bool launch_writing(torch::jit::Stack* stack) const {
    const auto& returns = op.schema().returns();
    if (!what.returns_written || any_empty || (!returns.empty() && returns.size() != written.size())) return false;
    launch([run = kernel()] { run(); });
    for (size_t i = 0; i < returns.size(); ++i) stack->push_back(written[i].first);
    return true;
  }
  // Returns new tensors, whose shapes a meta kernel knows.
  bool launch_making(torch::jit::Stack* stack) const {
    if (!what.returns_tensors || !written.empty() || what.no_meta) return false;
    std::vector<IValue> metas = given;
    {
      Below below;
      for (auto& value : metas) {
        each_tensor(value, [](const Tensor& tensor) {
          if (!tensor.is_cuda() && tensor.dim() == 0) return tensor;
          return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
        });
        if (value.isDevice()) value = c10::Device(c10::kMeta);
      }
      try {
        op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &metas);
      } catch (const std::exception&) {
        return false;  // there is none, or it is the caller's mistake, which the kernel will say better
      }
    }
    for (auto& value : metas)
      if (!value.isTensor() || (value.toTensor().defined() && !value.toTensor().is_meta())) return false;
    std::vector<std::pair<size_t, Tensor>> results;  // as the kernel sees them
    Storages fresh;
    for (size_t i = 0; i < metas.size(); ++i) {
      const Tensor& meta = metas[i].toTensor();
      Tensor result;
      if (meta.defined()) {
        result = at::detail::empty_strided_generic(meta.sizes(), meta.strides(), &device_allocator,
                                                   DispatchKeySet(DispatchKey::CUDA), meta.scalar_type());
        results.emplace_back(i, seen(result, fresh));
      }
      stack->push_back(result);
    }
    launch([run = kernel(), results] {
      auto made = run();
      InKernel scope;
      for (auto& [i, result] : results)
        if (result.numel()) Tensor(result).copy_(made[i].toTensor());
    });
    return true;
  }
  void run_at_once(torch::jit::Stack* stack) {
    if (!what.returns_views && !in_kernel) {
      synchronize(current_queue());
      if (order != Order::eager) count("at once: " + what.name);
    }
    auto made = kernel()();
    for (auto& [tensor, kernels] : written) grow(tensor, kernels);
    for (auto& value : made) {
      each_tensor(value, [&](const Tensor& one) {
        for (auto& [tensor, kernels] : written)
          if (kernels.is_same(one)) return tensor;
        return returned(one, owners);
      });
      stack->push_back(value);
    }
  }
  // An argument named `out` may have got another shape.
  static void grow(const Tensor& tensor, const Tensor& kernels) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (kernels.storage().nbytes() > storage->nbytes()) {
      Tensor larger = returned(kernels, {});
      storage->set_data_ptr_noswap(
          std::move(larger.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      storage->set_nbytes(kernels.storage().nbytes());
    }
    if (kernels.sizes() != tensor.sizes())
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(kernels.sizes(), kernels.strides(), kernels.storage_offset());
  }
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t arity = op.schema().arguments().size();
  std::vector<IValue> given(stack->end() - arity, stack->end());
  On device(device_for(op, given));
  const auto& what = about(op);
  Call call(op, what, std::move(given));
  torch::jit::drop(*stack, arity);
  if (call.may_be_late()) {
    if (call.launch_writing(stack) || call.launch_making(stack)) return;
    call.run_at_once(stack);
    if (what.returns_tensors) what.no_meta = true;  // since it was no mistake of the caller's
    return;
  }
  call.run_at_once(stack);
}

// -- operators with kernels of their own -----------------------------------------------------------------------------

inline int device_of_argument(std::optional<at::Device> device) {
  return device ? checked(device->index()) : current_device;
}
inline Tensor poisoned(Tensor tensor) {  // what nobody has written is NaN
  size_t bytes = tensor.storage().nbytes();
  if (bytes) launch([p = physical(tensor.storage().data(), bytes), bytes] { memset(p, 0xff, bytes); });
  return tensor;
}
inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On scope(device_of_argument(device));
  return poisoned(at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                            c10::dtype_or_default(dtype), format));
}
inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  On scope(device_of_argument(device));
  return poisoned(at::detail::empty_strided_generic(
      size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype)));
}

inline Tensor& copy_between(Tensor& self, const Tensor& source, std::function<void()> work) {
  int to = self.get_device(), from = source.get_device();
  if (to == from) {
    On scope(to);
    launch(std::move(work));
    return self;
  }
  // On the source's stream, ordered on both sides with the target's, as torch does.
  auto &there = queues[to][current_streams[to]], &here = queues[from][current_streams[from]];
  wait(here, record(there));
  launch(here, {std::move(work), {}, {}});
  wait(there, record(here));
  return self;
}
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  Storages storages;
  Tensor to = seen(self, storages), from = seen(source, storages);
  auto work = [to, from] {
    InKernel scope;
    Tensor(to).copy_(from);
  };
  if (self.is_cuda() && source.is_cuda()) return copy_between(self, source, work);
  const Tensor& host = self.is_cuda() ? source : self;
  On scope(self.is_cuda() ? self.get_device() : source.get_device());
  auto& queue = current_queue();
  if (!registered.holds(host.storage().data(), host.storage().nbytes())) {
    // The driver copies through a buffer of its own: what the host has is taken at once, what it gets it has to wait for.
    TORCH_CHECK(!queue.no_pageable, "fake: a copy of ", host.nbytes(),
                " bytes of pageable memory on a stream that has to be asynchronous");
    if (self.is_cuda()) {
      count("pageable copies in");
      Below below;
      launch(queue, {[to, taken = from.clone()] {
                       InKernel scope;
                       Tensor(to).copy_(taken);
                     },
                     {}, {}});
    } else {
      count("pageable copies out");
      launch(queue, {work, {}, {}});
      synchronize(queue);
    }
    return self;
  }
  count(non_blocking ? "asynchronous copies" : "blocking copies");
  launch(queue, {work, {}, {}});
  if (!non_blocking) synchronize(queue);
  return self;
}

inline at::Scalar local_scalar(const Tensor& self) {
  On scope(self.get_device());
  count("item()");
  synchronize(current_queue());
  Storages storages;
  Tensor kernels = seen(self, storages);
  InKernel kernel;
  return kernels.item();
}

inline const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  On scope(self.get_device());
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    synchronize(current_queue());
    auto larger = device_allocator.allocate(bytes);
    if (size_t had = storage->nbytes()) memcpy(physical(larger.get(), bytes), physical(storage->data(), had), had);
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

inline Tensor& set_nothing(Tensor& self) {
  On scope(self.get_device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}
inline Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t length = storage.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, storage, 0, {length}, {});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return at::native::set_storage_cpu_(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

inline Queue& queue_of(const at::Stream& stream) { return queues[stream.device_index()][stream.id()]; }
inline void record_stream(Tensor& self, at::Stream stream) {
  count("record_stream");
  gpus[self.get_device()].use(self.storage().data(), queue_of(stream));
}

// The only attention that needs no kernel of CUDA's own: products and a softmax.
inline int64_t attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}

}  // namespace fake
