// What an instruction set must define: the words of cpu/simd that the algorithms use. cpu/simd/scalar.h says what each
// of them does. Where one is missing, or takes something else, the compiler names its group here, and the word.
#pragma once

/// The types of a vocabulary. A template, so that the words are looked for when their group is checked: one that is
/// missing then makes the check fail, instead of an error in every function that uses it.
template <class>
struct VocabularyTypes {
  using Float = float;
  using Byte = uint8_t;
  using HalfWord = uint16_t;
  // Vectors of 4 kLanes bytes.
  using Floats = F32;
  using Ints = I32;
  using Words = U32;
  using HalfWords = U16;
  using DoubleWords = U64;
  using AllBytes = Bytes;
  // Vectors of 16 bytes.
  using Int16x8 = I16x8;
  using Int32x4 = I32x4;
};

// What an instruction set says of itself.
static_assert(kLanes == 4 || kLanes == 8 || kLanes == 16, "kLanes: lanes of a vector");
static_assert(kTileRows > 0 && kTileVectors * kLanes % 16 == 0, "kTileRows, kTileVectors: shape of the micro-tile");
static_assert(kRegisters >= 16, "kRegisters: vectors that a loop can keep");
static_assert(std::is_same_v<decltype(has_quick_subnormals()), bool>);

template <class T>
concept HasFloatWords =
    requires(typename T::Floats v, const typename T::Float* from, typename T::Float* to, typename T::Float x) {
      store(to, load(from));
      v = broadcast(x);
      v = multiply_add(v, v, v);
      v = limited_magnitude(v, x);
      v = at_least(v, x);
      v = at_most(v, x);
    };
static_assert(HasFloatWords<VocabularyTypes<void>>, "the vocabulary lacks a word of float32");

template <class T>
concept HasHalfWords = requires(typename T::Floats v, typename T::Floats (&four)[4], typename T::Words bits,
                                const typename T::HalfWord* from, typename T::HalfWord* to) {
  v = load_f16(from);
  store_f16(to, v);
  load_bf16(from, four);
  store_upper(to, bits, bits);
};
static_assert(HasHalfWords<VocabularyTypes<void>>, "the vocabulary lacks a word of float16 or bfloat16");
static_assert(sizeof(load_bytes_as_f16<1, 1>(nullptr)) == sizeof(F32));

template <class T>
concept HasIntegerWords =
    requires(typename T::Words v, typename T::HalfWords w, typename T::DoubleWords d, typename T::Int16x8 int16x8,
             typename T::Int32x4 int32x4, const typename T::Byte* bytes, const typename T::HalfWord* from,
             typename T::HalfWord* to) {
      v = load_u8(bytes);
      v = load_u16(from);
      store_u16(to, v);
      w = load_u8_words(bytes);
      w = low_halves(v, v);
      w = smaller(w, w);
      w = excess(w, w);
      v = join_nibbles(w);
      v = blend_bits(0u, v, v);
      d = multiply_low(d, d);
      static_cast<bool>(any(v));
      largest_lane(int16x8) + largest_lane(int32x4);
    };
static_assert(HasIntegerWords<VocabularyTypes<void>>, "the vocabulary lacks a word of integers");

template <class T>
concept HasByteWords = requires(typename T::AllBytes b, typename T::HalfWords w, typename T::Words (&four)[4],
                                const typename T::Byte* from, typename T::Byte* to) {
  b = repeat_table(from);
  b = look_up(b, b);
  w = multiply_pairs(b, b);
  b = smaller(b, b);
  b = excess(b, b);
  b = low_bytes(w, w);
  b = upper_bytes(w, w);
  b = low_bytes(four);
  b = upper_bytes(four);
  store_bytes_of_words(to, b);
  store_bytes_of_lanes(to, b);
  store_u8(to, four);
  stream_64(to, from);
};
static_assert(HasByteWords<VocabularyTypes<void>>, "the vocabulary lacks a word of bytes");
static_assert(std::is_void_v<decltype(finish_streams())>);

/// Beside these, a product in lanes of int8 needs kInt8Rows, kInt8RegisterRows, the type Products and these words. It
/// checks them (gemm/int8_microkernel.inl.h).
template <class T>
concept HasInt8Words = requires(typename T::AllBytes b, typename T::Ints i, typename T::Sums sums,
                                const typename T::Byte* from, typename T::Byte* to) {
  store_bytes(to, load_bytes(from));
  b = broadcast_bytes(from);
  interleave_lanes(b, b);
  sums = dot(sums, b, b);
  i = total(sums);
  i = kept_start(i);
};

/// A product in lanes of bfloat16 needs the types Halves and ByteTable and these (gemm/bf16_microkernel.inl.h).
template <class T>
concept HasBf16Words =
    requires(typename T::AllBytes b, typename T::Pairs pairs, typename T::Table table, typename T::Floats sum,
             const typename T::Byte* from, typename T::Byte* to, uint32_t x) {
      store_bytes(to, load_bytes(from));
      interleave_lanes(b, b);
      pairs = load_halves(from);
      pairs = broadcast_halves(from);
      sum = dot(sum, pairs, pairs);
      table = load_table(from);
      b = look_up(table, b);
      static_cast<bool>(any(b));
      static_cast<bool>(any_at_least(b, b));
    };

// A product by tiles needs the words of cpu/simd/avx512_amx.h on top of both.
