// Plain memory in and out of vectors of f32, by element type.
#pragma once

inline U32 bits_of(F32 x) { return reinterpret_cast<U32>(x); }
inline F32 float_of(U32 x) { return reinterpret_cast<F32>(x); }

template <DType D>
using Plain = std::conditional_t<D == DType::f32, float, uint16_t>;

inline F32 load_bf16(const uint16_t* p) { return reinterpret_cast<F32>(load_u16(p) << 16); }

/// f32_to_bf16() of every lane, in the upper halves. Without kNan no lane is NaN.
template <bool kNan>
inline U32 rounded_to_bf16(F32 v) {
  const U32 u = reinterpret_cast<U32>(v);
  const U32 rounded = u + 0x7FFFu + (u >> 16 & 1u);
  if constexpr (!kNan) return rounded;
  return (u & 0x7FFFFFFFu) > 0x7F800000u ? u | 0x400000u : rounded;
}
inline void store_bf16(uint16_t* p, F32 v) { store_u16(p, rounded_to_bf16<true>(v) >> 16); }

template <DType D>
F32 load_as(const Plain<D>* p) {
  if constexpr (D == DType::f32) return load(p);
  if constexpr (D == DType::f16) return load_f16(p);
  if constexpr (D == DType::bf16) return load_bf16(p);
}

/// Four vectors of consecutive elements.
template <DType D>
void load_as(const Plain<D>* p, F32 (&v)[4]) {
  if constexpr (D == DType::bf16) return load_bf16(p, v);
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) v[q] = load_as<D>(p + q * kLanes);
}

template <DType D>
float widen(Plain<D> x) {
  if constexpr (D == DType::f32) return x;
  if constexpr (D == DType::f16) return f16_to_f32(x);
  if constexpr (D == DType::bf16) return bf16_to_f32(x);
}

/// Rounds to nearest even.
template <DType D>
void store_as(Plain<D>* p, F32 v) {
  if constexpr (D == DType::f32) store(p, v);
  if constexpr (D == DType::f16) store_f16(p, v);
  if constexpr (D == DType::bf16) store_bf16(p, v);
}

/// What is known of numbers that are to be rounded: nothing, that none is NaN, or that they need no rounding either.
enum class Known { nothing, no_nan, exact };

/// The same of two vectors.
template <DType D, Known kKnown>
void store_as(Plain<D>* p, F32 first, F32 second) {
  if constexpr (D != DType::bf16) {
    store_as<D>(p, first);
    store_as<D>(p + kLanes, second);
  } else if constexpr (kKnown == Known::exact) {
    store_upper(p, bits_of(first), bits_of(second));
  } else {
    constexpr bool nan = kKnown == Known::nothing;
    store_upper(p, rounded_to_bf16<nan>(first), rounded_to_bf16<nan>(second));
  }
}

/// Calls body with the element type as a constant: body(std::integral_constant<DType, D>).
template <class Body>
void with_dtype(DType dtype, const Body& body) {
  if (dtype == DType::f32) return body(std::integral_constant<DType, DType::f32>{});
  if (dtype == DType::f16) return body(std::integral_constant<DType, DType::f16>{});
  return body(std::integral_constant<DType, DType::bf16>{});
}

/// Calls body with an element format of a list as a constant: body(std::integral_constant<Format, F>).
template <const auto& kList, size_t I = 0, class Body>
[[gnu::always_inline]] inline void with_element(Format element, const Body& body) {
  if constexpr (I + 1 < kList.size())
    if (element != kList[I]) return with_element<kList, I + 1>(element, body);
  body(std::integral_constant<Format, kList[I]>{});
}

/// Calls body with what a spec's codes and scales are, and with a dtype, as constants: body(Format, ScaleKind, DType).
template <size_t I = 0, class Body>
void with_kinds(const QuantSpec& spec, DType dtype, const Body& body) {
  constexpr Kinds kinds = kKinds[I];
  if constexpr (I + 1 < kKinds.size())
    if (spec.element != kinds.element || spec.row().scale != kinds.scale) return with_kinds<I + 1>(spec, dtype, body);
  with_dtype(dtype, [&](auto d) {
    body(std::integral_constant<Format, kinds.element>{}, std::integral_constant<ScaleKind, kinds.scale>{}, d);
  });
}
