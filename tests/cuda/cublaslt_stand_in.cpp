#include "cuda/cublaslt_stand_in.h"

#include <array>
#include <cstring>
#include <memory>
#include <mutex>

#include "quire/base/check.h"
#include "quire/format/codec.h"
#include "quire/format/element.h"
#include "quire/spec/scale.h"

// What cuBLASLt's types are here.
namespace quire::cuda::lt {
struct HandleOf {};
struct DescOf {
  std::map<int, std::string> attributes;
};
struct PreferenceOf {
  std::map<int, std::string> attributes;
};
struct LayoutOf {
  int type;
  int64_t rows, cols, ld;
};
}  // namespace quire::cuda::lt

namespace quire::testing {
namespace {

using namespace cuda;  // NOLINT: this file is all about its types

constexpr int kInvalid = 7, kNotSupported = 15;
constexpr uint64_t kFound = 0x5EED;

LtState* current = nullptr;
std::mutex mutex;  ///< of *current

template <class T>
T value_of(const std::map<int, std::string>& attributes, int which, T otherwise) {
  const auto found = attributes.find(which);
  if (found == attributes.end()) return otherwise;
  check(found->second.size() == sizeof(T), "cuBLASLt: attribute ", which, " has ", found->second.size(), " bytes");
  T value;
  std::memcpy(&value, found->second.data(), sizeof value);
  return value;
}

int bits_of(int type) { return type == lt::kF32 ? 32 : type == lt::kE2M1 ? 4 : type >= lt::kE4M3 ? 8 : 16; }
DType dtype_of(int type) { return type == lt::kF32 ? DType::f32 : type == lt::kF16 ? DType::f16 : DType::bf16; }
Format format_of(int type) {
  return type == lt::kE2M1 ? Format::e2m1 : type == lt::kE5M2 ? Format::e5m2 : Format::e4m3;
}
bool multiple(int64_t n, int64_t of) { return n % of == 0; }

/// A or B: its numbers, contracted from l = 0 on, of line `i`: a row of op(A), a column of op(B).
struct Side {
  const lt::LayoutOf& layout;
  const void* data;
  const void* scales;
  lt::ScaleMode mode;
  bool lines_are_columns;  ///< of the memory

  int64_t lines() const { return lines_are_columns ? layout.cols : layout.rows; }
  int64_t length() const { return lines_are_columns ? layout.rows : layout.cols; }
  int64_t blocks(int64_t of) const { return (length() + of - 1) / of; }

  double code(int64_t i, int64_t l) const {
    const int64_t at = lines_are_columns ? i * layout.ld + l : l * layout.ld + i;
    const auto* const bytes = static_cast<const uint8_t*>(data);
    if (layout.type == lt::kBF16) return static_cast<double>(load_element(data, DType::bf16, at));
    if (layout.type != lt::kE2M1) return static_cast<double>(decode(format_of(layout.type), bytes[at]));
    return static_cast<double>(decode(Format::e2m1, at % 2 == 0 ? bytes[at / 2] & 15 : bytes[at / 2] >> 4));
  }
  /// Tiles of 128 lines and 4 blocks, one after another; in each, line 0, 32, 64, 96, then 1, 33 and so on.
  static int64_t in_tiles(int64_t i, int64_t block, int64_t blocks) {
    const int64_t tiles = (blocks + 3) / 4;
    return (i / 128 * tiles + block / 4) * 512 + (i % 32) * 16 + (i / 32 % 4) * 4 + block % 4;
  }
  int64_t scale_at(int64_t i, int64_t l) const {
    switch (mode) {
      case lt::kEachLine:
        return i;
      case lt::kEach128:
        return l / 128 * lines() + i;
      case lt::kEach128x128:
        return i / 128 * ((blocks(128) + 3) / 4 * 4) + l / 128;
      case lt::kEach16E4M3:
        return in_tiles(i, l / 16, blocks(16));
      case lt::kEach32E8M0:
        return in_tiles(i, l / 32, blocks(32));
      default:
        return 0;
    }
  }
  /// The highest index of a scale, and its size in bytes.
  size_t scale_bytes() const {
    const int64_t padded_lines = (lines() + 127) / 128 * 128;
    if (mode == lt::kEach16E4M3) return static_cast<size_t>(padded_lines * ((blocks(16) + 3) / 4 * 4));
    if (mode == lt::kEach32E8M0) return static_cast<size_t>(padded_lines * ((blocks(32) + 3) / 4 * 4));
    return 4 * static_cast<size_t>(scale_at(lines() - 1, length() - 1) + 1);
  }
  double scale(int64_t i, int64_t l) const {
    if (!scales) return 1;
    const int64_t at = scale_at(i, l);
    if (mode == lt::kEach16E4M3)
      return static_cast<double>(decode(Format::e4m3, static_cast<const uint8_t*>(scales)[at] & 0x7F));
    if (mode == lt::kEach32E8M0) return static_cast<double>(e8m0_value(static_cast<const uint8_t*>(scales)[at]));
    return static_cast<double>(static_cast<const float*>(scales)[at]);
  }
  size_t bytes() const { return static_cast<size_t>(layout.ld * layout.cols * bits_of(layout.type) / 8); }
};

struct Product {
  const lt::DescOf& desc;
  Side a, b;
  const lt::LayoutOf& d;

  Product(const lt::DescOf& of, const lt::LayoutOf& of_a, const lt::LayoutOf& of_b, const lt::LayoutOf& of_d)
      : desc(of),
        a{of_a, nullptr, scales(lt::kScalesOfA), mode(lt::kScaleModeOfA), transposed(lt::kTransposeA)},
        b{of_b, nullptr, scales(lt::kScalesOfB), mode(lt::kScaleModeOfB), !transposed(lt::kTransposeB)},
        d(of_d) {}

  bool has_bias() const { return value_of<uint32_t>(desc.attributes, lt::kEpilogue, 1) == lt::kBiasEpilogue; }
  int bias_type() const { return value_of<int32_t>(desc.attributes, lt::kBiasType, d.type); }
  const void* bias() const { return value_of<const void*>(desc.attributes, lt::kBiasPointer, nullptr); }

  /// cublasStatus_t of what NVIDIA's documents and PyTorch's operators say is served.
  int status(const Machine& machine) const {
    if (a.length() != b.length() || a.lines() != d.rows || b.lines() != d.cols || d.ld < d.rows) return kInvalid;
    const int chip = machine.number();
    if (a.layout.type == lt::kBF16) return status_in_bf16();
    const bool blocks = a.mode == lt::kEach16E4M3 || a.mode == lt::kEach32E8M0;
    const bool blackwell = chip / 10 == 10 || chip / 10 == 12;
    if (chip < 89 || (blocks && !blackwell)) return kNotSupported;
    const bool by128 = a.mode == lt::kEach128 || a.mode == lt::kEach128x128;
    if ((by128 || a.mode == lt::kEachLine) && (chip != 90 || machine.cublaslt < 120900)) return kNotSupported;
    if (by128 ? (b.mode != lt::kEach128 && b.mode != lt::kEach128x128) : a.mode != b.mode) return kNotSupported;
    if (a.mode == lt::kEach128x128 && b.mode == lt::kEach128x128) return kNotSupported;
    const bool any_order = a.mode == lt::kEach32E8M0 && (chip / 10 == 10 || machine.cublaslt >= 130600);
    if (!any_order && !(a.lines_are_columns && b.lines_are_columns)) return kNotSupported;
    if ((a.layout.type == lt::kE2M1) != (a.mode == lt::kEach16E4M3)) return kNotSupported;
    if (a.layout.type == lt::kE5M2 && b.layout.type == lt::kE5M2) return kNotSupported;
    for (const lt::LayoutOf* m : {&a.layout, &b.layout, &d})
      if (!multiple(m->ld * bits_of(m->type), 128) || !multiple(m->rows * bits_of(m->type), 128)) return kNotSupported;
    for (const Side* s : {&a, &b})
      if (s->mode == lt::kEach128 && !multiple(s->lines(), 4)) return kNotSupported;
    if (!multiple(a.lines(), 16) || !multiple(a.length(), 16)) return kNotSupported;
    if (has_bias() && bias_type() != (d.type == lt::kF32 ? lt::kBF16 : d.type)) return kNotSupported;
    return value_of<int8_t>(desc.attributes, lt::kFastAccumulation, 0) == 0 ? 0 : kNotSupported;
  }

  /// Row i and column j of D, before C is added.
  double sum(int64_t i, int64_t j) const {
    double all = 0;
    for (int64_t l = 0; l < a.length(); ++l) all += a.code(i, l) * a.scale(i, l) * b.code(j, l) * b.scale(j, l);
    return all;
  }

 private:
  int status_in_bf16() const {
    if (b.layout.type != lt::kBF16 || a.mode != lt::kScalar || b.mode != lt::kScalar) return kNotSupported;
    if (a.scales || b.scales || (d.type != lt::kBF16 && d.type != lt::kF32)) return kNotSupported;
    for (const lt::LayoutOf* m : {&a.layout, &b.layout, &d})
      if (!multiple(m->ld * bits_of(m->type), 128)) return kNotSupported;
    return has_bias() && bias_type() != d.type ? kNotSupported : 0;
  }
  bool transposed(int which) const { return value_of<int32_t>(desc.attributes, which, 0) == 1; }
  const void* scales(int which) const { return value_of<const void*>(desc.attributes, which, nullptr); }
  lt::ScaleMode mode(int which) const {
    return static_cast<lt::ScaleMode>(value_of<int32_t>(desc.attributes, which, lt::kScalar));
  }
};

/// A product that is put on a stream: what describes it may be gone when it runs.
struct Work {
  lt::DescOf desc;
  lt::LayoutOf a, b, c, d;

  /// In the order of `uses` of multiply().
  void operator()(const std::vector<const void*>& where) const {
    Product p(desc, a, b, d);
    p.a.data = where[0], p.b.data = where[1], p.a.scales = where[2], p.b.scales = where[3];
    const void* const addend = where[4];
    void* const out = const_cast<void*>(where[5]);
    const auto by = static_cast<double>(*static_cast<const float*>(where[6]));
    const auto of_c = static_cast<double>(*static_cast<const float*>(where[7]));
    const DType dtype = dtype_of(d.type), bias_dtype = dtype_of(p.bias_type());
    for (int64_t j = 0; j < d.cols; ++j)
      for (int64_t i = 0; i < d.rows; ++i) {
        double y = by * p.sum(i, j);
        if (of_c != 0) y += of_c * static_cast<double>(load_element(addend, dtype, j * c.ld + i));
        if (p.has_bias()) y += static_cast<double>(load_element(where.at(9), bias_dtype, i));
        store_element(out, dtype, j * d.ld + i, static_cast<float>(y));
      }
  }
};

int set_attribute(lt::Desc desc, int which, const void* value, size_t bytes) {
  desc->attributes[which].assign(static_cast<const char*>(value), bytes);
  return 0;
}

int set_wish(lt::Preference preference, int which, const void* value, size_t bytes) {
  preference->attributes[which].assign(static_cast<const char*>(value), bytes);
  return 0;
}

int create_layout(lt::Layout* layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  *layout = new lt::LayoutOf{type, static_cast<int64_t>(rows), static_cast<int64_t>(cols), ld};
  return 0;
}

int find_algorithm(lt::Handle, lt::Desc desc, lt::Layout a, lt::Layout b, lt::Layout, lt::Layout d,
                   lt::Preference preference, int most, lt::Heuristic* answer, int* found) {
  const std::lock_guard lock(mutex);
  ++current->asked;
  current->last.wishes = preference->attributes;
  *found = 0;
  if (const int status = Product(*desc, *a, *b, *d).status(current->machine); status != 0) return status;
  *found = most;
  answer->algorithm.data[0] = kFound;
  answer->workspace = current->workspace;
  answer->status = current->answer;
  return 0;
}

int multiply(lt::Handle, lt::Desc desc, const void* alpha, const void* a, lt::Layout a_layout, const void* b,
             lt::Layout b_layout, const void* beta, const void* c, lt::Layout c_layout, void* d, lt::Layout d_layout,
             const lt::Algorithm* algorithm, void* workspace, size_t workspace_bytes, lt::Stream stream) {
  const std::lock_guard lock(mutex);
  const Product p(*desc, *a_layout, *b_layout, *d_layout);
  if (algorithm->data[0] != kFound || workspace_bytes < current->workspace) return kInvalid;
  if (const int status = p.status(current->machine); status != 0) return status;
  if (current->result != 0) return current->result;
  current->last.product = desc->attributes;
  const auto out_bytes = static_cast<size_t>(((p.d.cols - 1) * p.d.ld + p.d.rows) * size_of(dtype_of(p.d.type)));
  check(reinterpret_cast<uintptr_t>(workspace) % 256 == 0, "cuBLASLt: the workspace is not aligned");
  const bool on_device = value_of<int32_t>(desc->attributes, lt::kPointerMode, 0) == lt::kPointersOfDevice;
  for (const void* const factor : {alpha, beta})
    check(current->place->has(factor) == on_device, "cuBLASLt: alpha and beta are elsewhere");
  // Factors of the host are read now, as by the library.
  const auto of_host = std::make_shared<std::array<float, 2>>();
  if (!on_device) *of_host = {*static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
  std::vector<LtUse> uses{{"A", a, p.a.bytes()},
                          {"B", b, p.b.bytes()},
                          {"scales of A", p.a.scales, p.a.scale_bytes()},
                          {"scales of B", p.b.scales, p.b.scale_bytes()},
                          {"C", c, out_bytes},
                          {"D", d, out_bytes, true},
                          {"alpha", on_device ? alpha : nullptr, sizeof(float)},
                          {"beta", on_device ? beta : nullptr, sizeof(float)},
                          {"the workspace", workspace, workspace_bytes, true}};
  if (p.has_bias())
    uses.push_back({"the bias", p.bias(), static_cast<size_t>(p.d.rows * size_of(dtype_of(p.bias_type())))});
  for (const LtUse& use : uses)
    check(reinterpret_cast<uintptr_t>(use.data) % (use.bytes > 4 || use.what.starts_with("scales") ? 16 : 4) == 0,
          "cuBLASLt: ", use.what, " is not aligned");
  current->place->run(uses, stream,
                      [work = Work{*desc, *a_layout, *b_layout, *c_layout, *d_layout}, of_host,
                       on_device](std::vector<const void*> where) {
                        if (!on_device) where[6] = of_host->data(), where[7] = of_host->data() + 1;
                        work(where);
                      });
  return 0;
}

}  // namespace

const lt::Functions& lt_stand_in(LtState& state) {
  current = &state;
  static std::vector<std::unique_ptr<const lt::Functions>> all;
  all.push_back(std::make_unique<lt::Functions>(lt::Functions{
      .GetVersion = [] { return static_cast<size_t>(current->machine.cublaslt); },
      .Create =
          [](lt::Handle* handle) {
            static lt::HandleOf one;
            ++current->handles;
            if (current->creation == 0) *handle = &one;
            return current->creation;
          },
      .MatmulDescCreate =
          [](lt::Desc* desc, int compute, int scale_type) {
            *desc = new lt::DescOf;
            return compute == lt::kComputeF32 && scale_type == lt::kF32 ? 0 : kInvalid;
          },
      .MatmulDescDestroy = [](lt::Desc desc) { return delete desc, 0; },
      .MatmulDescSetAttribute = set_attribute,
      .MatrixLayoutCreate = create_layout,
      .MatrixLayoutDestroy = [](lt::Layout layout) { return delete layout, 0; },
      .MatmulPreferenceCreate = [](lt::Preference* preference) { return *preference = new lt::PreferenceOf, 0; },
      .MatmulPreferenceDestroy = [](lt::Preference preference) { return delete preference, 0; },
      .MatmulPreferenceSetAttribute = set_wish,
      .MatmulAlgoGetHeuristic = find_algorithm,
      .Matmul = multiply}));
  return *all.back();
}

}  // namespace quire::testing
