// What torch is told: the device's guard, the hooks of CUDA, the kernels; and what Python and ctypes call.
//
// Must be loaded before torch is imported, which asks for the hooks of CUDA once, on its way.
#include "kernels.hpp"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>

namespace fake {
namespace {

// Tells whoever watches (torch's sanitizer) as CUDA's own guard does. Takes Python's lock: never under the driver's.
template <class Tell>
void trace(Tell tell) {
  if (const auto* watcher = c10::impl::GPUTrace::get_trace()) tell(**watcher);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Index = c10::DeviceIndex;
  using Stream = c10::Stream;

  static Device device(int index) { return Device(c10::kCUDA, index); }
  static Stream stream(int index, int id) { return Stream(Stream::UNSAFE, device(index), id); }
  c10::DeviceType type() const override { return c10::kCUDA; }
  Index deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return device(current_device); }
  void setDevice(Device d) const override { current_device = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }

  Stream getStream(Device d) const override { return stream(checked(d.index()), current_streams[checked(d.index())]); }
  Stream getDefaultStream(Device d) const override { return stream(checked(d.index()), 0); }
  Stream getNewStream(Device d, int) const override {
    static std::atomic<int> next[MOST_DEVICES];
    int index = checked(d.index());
    return stream(index, 1 + next[index]++ % (STREAMS - 1));
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const Stream& s) const override {
    Lock lock(driver);
    progress();
    return queue_of(s).done == queue_of(s).issued;
  }
  void synchronizeStream(const Stream& s) const override {
    count("stream synchronisations");
    trace([&](auto& to) { to.trace_gpu_stream_synchronization(c10::kCUDA, s.id()); });
    synchronize(queue_of(s));
  }
  void synchronizeDevice(const Index index) const override {
    count("device synchronisations");
    trace([&](auto& to) { to.trace_gpu_device_synchronization(c10::kCUDA); });
    synchronize_device(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    if (data.get() && data.device().is_cuda()) gpus[data.device().index()].use(data.get(), queue_of(s));
  }

  // An event is a pointer to the mark that it stands for at present.
  static MarkPtr& mark(void* event) { return *(MarkPtr*)event; }
  void record(void** event, const Stream& s, const Index, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    trace([&](auto& to) { to.trace_gpu_event_record(c10::kCUDA, (uintptr_t)*event, s.id()); });
    mark(*event) = fake::record(queue_of(s));
  }
  void block(void* event, const Stream& s) const override {
    if (!event) return;  // one that was not recorded orders nothing
    trace([&](auto& to) { to.trace_gpu_event_wait(c10::kCUDA, (uintptr_t)event, s.id()); });
    wait(queue_of(s), mark(event));
  }
  bool queryEvent(void* event) const override { return !event || query(*mark(event)); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    trace([&](auto& to) { to.trace_gpu_event_synchronization(c10::kCUDA, (uintptr_t)event); });
    synchronize(*mark(event));
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete (MarkPtr*)event; }
  double elapsedTime(void* begin, void* end, const Index) const override {
    synchronizeEvent(begin);
    synchronizeEvent(end);
    return (mark(end)->time - mark(begin)->time) * 1e3;
  }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  c10::DeviceIndex current_device() const override { return fake::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return fake::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { fake::current_device = checked(index); }
  void deviceSynchronize(c10::DeviceIndex index) const override { Guard().synchronizeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator(checked(index)); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(0); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool isPinnedPtr(const void* p) const override { return registered.holds(p); }
  c10::Device getDeviceFromPtr(void* p) const override {
    if (int index = device_of(p); index >= 0) return c10::Device(c10::kCUDA, index);
    TORCH_CHECK(registered.holds(p), "The specified pointer resides on host memory and is not registered with any CUDA "
                                     "device.");
    return c10::Device(c10::kCUDA, fake::current_device);
  }
};

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
// What bitsandbytes has in Python for every device comes before a fallback, and is twenty kernels for each expert.
TORCH_LIBRARY_IMPL(bitsandbytes, CUDA, m) {
  for (auto* name : {"dequantize_4bit", "dequantize_blockwise"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(fake::empty));
  m.impl("empty_strided", TORCH_FN(fake::empty_strided));
  m.impl("copy_", TORCH_FN(fake::copy_));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("resize_", TORCH_FN(fake::resize));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("record_stream", TORCH_FN(fake::record_stream));
}

// Torch without CUDA has no generators for it in Python: these are what torch.cuda.default_generators does.
at::Generator& waited_for(int64_t device) {
  synchronize_device((int)device);
  return generator((int)device);
}
TORCH_LIBRARY(fake_cuda, m) {
  m.def("generator_state", [](int64_t device) { return waited_for(device).get_state().clone(); });
  m.def("set_generator_state", [](int64_t device, const Tensor& state) { waited_for(device).set_state(state); });
  m.def("seed_generator", [](int64_t device, int64_t seed) { waited_for(device).set_current_seed((uint64_t)seed); });
  m.def("generator_seed", [](int64_t device) { return (int64_t)generator((int)device).current_seed(); });
}

}  // namespace
}  // namespace fake

C10_REGISTER_GUARD_IMPL(CUDA, fake::Guard)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, ::fake::Hooks)
}

// -- what ctypes calls: the CUDA runtime (the library has its soname), and what stands behind torch.cuda --------------

using namespace fake;
extern "C" {

int cudaHostRegister(void* p, size_t bytes, unsigned) { return host_register(p, bytes); }
int cudaHostUnregister(void* p) { return host_unregister(p); }
int cudaHostGetDevicePointer(void** out, void* p, unsigned) {
  if (!registered.holds(p)) return INVALID_VALUE;
  *out = p;
  return 0;
}
int cudaGetLastError() { return 0; }

void fake_open() {
  static bool opened = false;
  if (std::exchange(opened, true)) return;
  for (int i = 0; i < devices; ++i) gpus[i].open();
  c10::SetAllocator(c10::kCUDA, &device_allocator);
  c10::SetCPUAllocator(&host_allocator, 200);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
}
void fake_initialise() { at::globalContext().lazyInitDevice(c10::kCUDA); }
int fake_forked() { return forked; }
int fake_device_count() { return devices; }
int fake_device() { return current_device; }
int fake_set_device(int index) { return index >= devices ? 1 : (current_device = index < 0 ? current_device : index, 0); }
int fake_stream(int index) { return current_streams[checked(index)]; }
void fake_set_stream(int index, int id) { current_streams[index] = id; }
void fake_synchronize(int index) { Guard().synchronizeDevice(checked(index)); }
double fake_elapsed_ms(void* begin, void* end) { return Guard().elapsedTime(begin, end, 0); }
void fake_forbid_pageable(int index, int stream, int forbidden) { queues[index][stream].no_pageable = forbidden; }

void fake_empty_cache() {
  Lock lock(driver);
  for (int i = 0; i < devices; ++i) gpus[i].trim();
}
void fake_cap(int index, double fraction) {
  Lock lock(driver);
  gpus[index].cap = (size_t)(fraction * gpus[index].total);
}
void fake_refuse_memory(int refused) {
  Lock lock(driver);
  refuses_memory = refused;
}
void fake_occupy(int index, size_t bytes) {
  Lock lock(driver);
  gpus[index].others = bytes;
}
void fake_reset_peak(int index) {
  Lock lock(driver);
  auto& gpu = gpus[index];
  gpu.peak_allocated = gpu.allocated, gpu.peak_reserved = gpu.reserved;
}
void fake_figures(int index, size_t* out) {
  Lock lock(driver);
  auto& gpu = gpus[index];
  for (size_t figure : {gpu.allocated, gpu.peak_allocated, gpu.reserved, gpu.peak_reserved, gpu.retries, gpu.frees,
                        gpu.failures, gpu.total, gpu.beside(), gpu.available(), registered.bytes})
    *out++ = figure;
}
void fake_counters(char* out, size_t room) {
  Lock lock(driver);
  std::string all;
  for (auto& [name, number] : counters) all += name + "\t" + std::to_string(number) + "\n";
  strncpy(out, all.c_str(), room - 1);
}
}
