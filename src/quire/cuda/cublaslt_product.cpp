#include "quire/cuda/cublaslt_product.h"

#include "quire/cuda/cublaslt_plan.h"
#include "quire/cuda/kernels/cublaslt.h"
#include "quire/cuda/launch.h"
#include "quire/spec/scale_index.h"

namespace quire::cuda {
namespace {

constinit const Kernel kArrangeScales{"cublaslt", "arrange_scales"};
constinit const Kernel kProductFactors{"cublaslt", "product_factors"};
constinit const Kernel kBf16Operand{"cublaslt", "bf16_operand"};

/// Outputs of a product in bfloat16, along either side.
constexpr int64_t kFewestBf16Lines = 128;

constexpr bool has_fp8(int chip) { return chip >= 89; }
constexpr bool is_hopper(int chip) { return chip == 90; }
constexpr bool has_block_scales(int chip) { return chip / 10 == 10 || chip / 10 == 12; }

/// What cuBLASLt multiplies: operands of one family, where the chip and the library can.
struct Served {
  Family family;
  lt::ScaleMode scales;
  bool (*chip)(int);
  std::string_view chips;
  int version;       ///< of cuBLASLt, at least
  int64_t multiple;  ///< of the contraction
};
constexpr auto kServed = std::to_array<Served>({
    {Family::fp8_tensor, lt::kScalar, has_fp8, "8.9 and newer", 120000, 16},
    {Family::fp8_row, lt::kEachLine, is_hopper, "9.0", 120900, 16},
    {Family::fp8_block, lt::kEach128, is_hopper, "9.0", 120900, 128},
    {Family::mxfp8, lt::kEach32E8M0, has_block_scales, "10.x and 12.x", 120800, 32},
    {Family::nvfp4, lt::kEach16E4M3, has_block_scales, "10.x and 12.x", 120800, 32},
});

const Served* served(Family family) {
  for (const Served& row : kServed)
    if (row.family == family) return &row;
  return nullptr;
}

/// 13.1.0 of 130100.
std::string version_text(int version) { return text(version / 10000, ".", version / 100 % 100, ".", version % 100); }

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kProductAlignment == 0; }

bool refuses_machine(const Served& row, const Machine& machine, Refusal* refusal) {
  if (!row.chip(machine.number()))
    return refused_here(refusal, "multiplies ", entry<kFamilies>(static_cast<size_t>(row.family)).name,
                        " on compute capability ", row.chips, ", but the device has ", machine.major, ".",
                        machine.minor);
  return machine.cublaslt < row.version && refused_here(refusal, "needs cuBLASLt ", version_text(row.version), ", but ",
                                                        version_text(machine.cublaslt), " is loaded");
}

bool refuses_specs(const GemmProblem& p, Refusal* refusal) {
  const QuantSpec &a = p.a.spec, &b = p.b.spec;
  if (a.family != b.family) return refused(refusal, "takes operands of one family, but they are ", a, " and ", b);
  if (a.interleaved || b.interleaved) return refused(refusal, "takes no interleaved codes");
  if (a.row_scaled || b.row_scaled) return refused(refusal, "takes NVFP4 with one global scale, but a row has its own");
  if (a.element == Format::e5m2 && b.element == Format::e5m2) return refused(refusal, "does not multiply E5M2 by E5M2");
  return a.family == Family::fp8_block && a.square && b.square &&
         refused(refusal, "takes scales of 128 x 128 in one operand, but both have them");
}

/// Rules of one operand. `lines`: a multiple that its outer size must be of.
bool refuses_operand(const Operand& o, const Served& row, int64_t lines, Refusal* refusal) {
  if (o.outer % lines != 0)
    return refused(refusal, "takes multiples of ", lines, " lines of ", o.what, ", which has ", o.outer);
  return (!is_aligned(o.data) || (row.scales != lt::kScalar && !is_aligned(o.scale))) &&
         refused(refusal, "takes memory that begins at multiples of ", kProductAlignment, " bytes, but that of ",
                 o.what, " does not");
}

bool refuses_sizes(const GemmProblem& p, const Served& row, Refusal* refusal) {
  if (p.out.rows == 0 || p.out.cols == 0 || p.a.contraction == 0) return refused(refusal, "takes no empty product");
  if (p.a.contraction % row.multiple != 0)
    return refused(refusal, "contracts multiples of ", row.multiple, " elements, but there are ", p.a.contraction);
  // Codes of a are columns, of which there may be any number, unless lines run against memory, or scales do.
  const int64_t lines = blocks_first(p.a.spec, p.a.direction)                      ? 16
                        : p.a.spec.family == Family::fp8_block && !p.a.spec.square ? 4
                                                                                   : 1;
  return refuses_operand(p.a, row, lines, refusal) || refuses_operand(p.b, row, 16, refusal);
}

/// `bias`: the dtype that one must have.
bool refuses_output(const GemmProblem& p, DType bias, Refusal* refusal) {
  const MutableMatrix& out = p.out;
  if (out.row_stride < out.cols || out.row_stride * size_of(out.dtype) % kProductAlignment != 0 ||
      !is_aligned(out.data))
    return refused(refusal, "writes rows that begin at multiples of ", kProductAlignment,
                   " bytes, but those of out do not");
  if (p.bias && (p.bias_dtype != bias || !is_aligned(p.bias)))
    return refused(refusal, "adds an aligned bias in ", name(bias), " to ", name(out.dtype), ", but it is in ",
                   name(p.bias_dtype));
  if (!p.addend) return false;
  if (out.dtype != DType::f32)
    return refused(refusal, "adds to out before it rounds, which is the contract's order in float32 only, but out is ",
                   name(out.dtype));
  return !is_aligned(p.addend) && refused(refusal, "adds memory that begins at multiples of ", kProductAlignment,
                                          " bytes, but that of the addend does not");
}

/// Codes whose lines run against memory, on chips where the library reads lines along memory alone.
bool refuses_transposed(const GemmProblem& p, const Machine& machine, Refusal* refusal) {
  constexpr int any_order = 130600;
  if (machine.major != 12 || machine.cublaslt >= any_order) return false;
  for (const Operand* const o : {&p.a, &p.b})
    if (blocks_first(o->spec, o->direction))
      return refused(refusal, "reads columnwise mxfp8 on compute capability 12.x from cuBLASLt ",
                     version_text(any_order), " on, but ", version_text(machine.cublaslt), " is loaded");
  return false;
}

lt::Type type_of(DType dtype) { return dtype == DType::f32 ? lt::kF32 : dtype == DType::f16 ? lt::kF16 : lt::kBF16; }

lt::Type type_of(Format element) {
  return element == Format::e2m1 ? lt::kE2M1 : element == Format::e5m2 ? lt::kE5M2 : lt::kE4M3;
}

/// How cuBLASLt sees an operand. Its A is transposed where lines run along memory, its B where they do not.
ProductOperand seen(const Operand& o, bool is_a, lt::Type type) {
  const bool against = blocks_first(o.spec, o.direction);
  const int64_t rows = against ? o.outer : o.contraction, cols = against ? o.contraction : o.outer;
  return {.codes = {type, rows, cols, rows}, .transposed = is_a != against};
}

ProductOperand seen(const Operand& o, bool is_a) {
  ProductOperand codes = seen(o, is_a, type_of(o.spec.element));
  const bool squares = o.spec.family == Family::fp8_block && o.spec.square;
  codes.scales = squares ? lt::kEach128x128 : served(o.spec.family)->scales;
  return codes;
}

/// A product of these A and B, in cuBLASLt's terms.
ProductShape shape_of(const GemmProblem& p, const ProductOperand& a, const ProductOperand& b) {
  return {.a = a,
          .b = b,
          .d = {type_of(p.out.dtype), p.out.cols, p.out.rows, p.out.row_stride},
          .bias = p.bias ? std::optional(type_of(p.bias_dtype)) : std::nullopt};
}

ProductShape shape_of(const GemmProblem& p) {
  ProductShape shape = shape_of(p, seen(p.b, true), seen(p.a, false));
  shape.factors = p.a.spec.family == Family::nvfp4;
  return shape;
}

/// Whether an operand has a factor that no block changes.
bool has_factor(const Operand& o) { return o.spec.row().scope == Scope::tensor || o.spec.row().has_amax; }

ProductShape shape_in_bf16(const GemmProblem& p) {
  ProductShape shape = shape_of(p, seen(p.b, true, lt::kBF16), seen(p.a, false, lt::kBF16));
  shape.factors = has_factor(p.a) || has_factor(p.b);
  return shape;
}

constexpr float kOne = 1, kZero = 0;

/// With scales as the problem has them.
ProductMemory memory_of(const GemmProblem& p) {
  return {.a = p.b.data,
          .a_scales = p.b.scale,
          .b = p.a.data,
          .b_scales = p.a.scale,
          .c = p.addend ? p.addend : p.out.data,
          .d = p.out.data,
          .bias = p.bias,
          .alpha = &kOne,
          .beta = p.addend ? &kOne : &kZero};
}

/// Without scales, which the numbers have in them.
ProductMemory memory_in_bf16(const GemmProblem& p) {
  ProductMemory memory = memory_of(p);
  memory.a_scales = memory.b_scales = nullptr;
  return memory;
}

/// An operand's scales in the order that cuBLASLt reads: their own memory where they are in it.
const void* arranged(const Operand& o, const Context& context) {
  const FamilyRow& row = o.spec.row();
  const bool of_tensor = row.scope == Scope::tensor;
  if (of_tensor ? is_aligned(o.scale) : row.scope != Scope::block || o.spec.swizzled) return o.scale;
  const int64_t blocks = block_count(o.spec, o.contraction);
  ScalesJob job{.from = o, .entries = round_up(blocks, kSwizzleCols)};
  if (of_tensor) {
    job.lines = job.entries = 1;
    job.to = lend_aligned(context, sizeof(float), kProductAlignment);
  } else if (row.scale != ScaleKind::f32) {
    job.lines = round_up(o.outer, kSwizzleRows);
    job.to = lend<uint8_t>(context, job.lines * job.entries);
  } else {
    if (!o.spec.square || job.entries == blocks) return o.scale;
    job.lines = ceil_div(o.outer, row.block);
    job.to = lend<float>(context, job.lines * job.entries);
  }
  launch(kArrangeScales, grid_of(job.lines * job.entries), job, context);
  return job.to;
}

bool refuses_library(Refusal* refusal) {
  return refused_here(refusal, "cuBLASLt (libcublasLt.so.13 or .12) is not on this machine");
}

bool refuses_shape(const ProductShape& shape, const ProductMemory& memory, const Context& context, Refusal* refusal) {
  const int status = plan_of(shape, memory, context).status;
  return status != lt::kSuccess && refused(refusal, "cuBLASLt ", version_text(driver().machine(context.index).cublaslt),
                                           " offers no algorithm for this product (status ", status, ")");
}

/// Puts the product on the stream, with its sums multiplied by the operands' factors if the shape has them.
void run(const ProductShape& shape, ProductMemory memory, const GemmProblem& p, const Context& context) {
  if (shape.factors) {
    const FactorsJob job{.a = p.a, .b = p.b, .has_addend = p.addend != nullptr, .to = lend<float>(context, 2)};
    launch(kProductFactors, grid_of(1, 1), job, context);
    memory.alpha = job.to, memory.beta = job.to + 1;
  }
  run_product(shape, memory, context);
}

/// Rules of an operand that is decoded.
bool refuses_decoding(const Operand& o, Refusal* refusal) {
  const FamilyRow& row = o.spec.row();
  if (o.spec.interleaved) return refused(refusal, "takes no interleaved codes");
  if (row.scope == Scope::row || o.spec.row_scaled)
    return refused(refusal, "takes one factor for all sums, but lines of ", o.spec, " have their own");
  if (row.scope == Scope::block && !has_byte_scales(o.spec))
    return refused(refusal, "takes codes whose product with their scale is exact in bfloat16, but ", o.what, " is ",
                   o.spec);
  const int64_t along = blocks_first(o.spec, o.direction) ? o.outer : o.contraction;
  constexpr int64_t multiple = 16;
  if (along % multiple != 0)
    return refused(refusal, "takes rows of a multiple of ", multiple, " codes, but those of ", o.what, " have ", along);
  return !is_aligned(o.data) && refused(refusal, "takes memory that begins at multiples of ", kProductAlignment,
                                        " bytes, but that of ", o.what, " does not");
}

/// In memory of the workspace, in the order that the codes have.
const void* in_bf16(const Operand& o, const Context& context) {
  const int64_t bytes = times(times(o.outer, o.contraction), size_of(DType::bf16));
  const Bf16Job job{.from = o, .to = lend_aligned(context, bytes, kProductAlignment)};
  const int64_t rows = blocks_first(o.spec, o.direction) ? o.contraction : o.outer;
  launch(kBf16Operand, grid_of(rows * kBf16Threads, kBf16Threads), job, context);
  return job.to;
}

}  // namespace

bool refuses_cublaslt(const GemmProblem& p, const Context& context, Refusal* refusal) {
  const Machine machine = driver().machine(context.index);
  if (machine.cublaslt == 0) return refuses_library(refusal);
  const Served* const row = served(p.a.spec.family);
  if (!row) return refused(refusal, "takes no ", p.a.spec);
  if (refuses_machine(*row, machine, refusal)) return true;
  if (p.in_groups()) return refused(refusal, "takes one product, but the problem has groups");
  const DType bias = p.out.dtype == DType::f32 ? DType::bf16 : p.out.dtype;
  if (refuses_specs(p, refusal) || refuses_sizes(p, *row, refusal) || refuses_output(p, bias, refusal) ||
      refuses_transposed(p, machine, refusal))
    return true;
  return refuses_shape(shape_of(p), memory_of(p), context, refusal);
}

void gemm_cublaslt(const GemmProblem& p, const Context& context) {
  ProductMemory memory = memory_of(p);
  memory.a_scales = arranged(p.b, context), memory.b_scales = arranged(p.a, context);
  run(shape_of(p), memory, p, context);
}

bool refuses_cublaslt_bf16(const GemmProblem& p, const Context& context, Refusal* refusal) {
  const Machine machine = driver().machine(context.index);
  if (machine.cublaslt == 0) return refuses_library(refusal);
  if (p.in_groups()) return refused(refusal, "takes one product, but the problem has groups");
  if (p.out.rows < kFewestBf16Lines || p.out.cols < kFewestBf16Lines || p.a.contraction == 0)
    return refused(refusal, "takes at least ", kFewestBf16Lines, " rows and columns, but there are ", p.out.rows,
                   " and ", p.out.cols, "; to decode an operand takes longer than it saves below");
  if (refuses_decoding(p.a, refusal) || refuses_decoding(p.b, refusal)) return true;
  if (refuses_output(p, p.out.dtype, refusal)) return true;
  return refuses_shape(shape_in_bf16(p), memory_in_bf16(p), context, refusal);
}

void gemm_cublaslt_bf16(const GemmProblem& p, const Context& context) {
  ProductMemory memory = memory_in_bf16(p);
  memory.a = in_bf16(p.b, context), memory.b = in_bf16(p.a, context);
  run(shape_in_bf16(p), memory, p, context);
}

}  // namespace quire::cuda
