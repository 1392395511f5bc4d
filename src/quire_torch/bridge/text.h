// Specs and recipes as operator arguments: they travel as text and are parsed once per distinct text.
#pragma once

#include <array>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "quire/base/lazy.h"
#include "quire/base/process_mutex.h"
#include "quire/spec/activation.h"
#include "quire/spec/linear_spec.h"
#include "quire/spec/quant_spec.h"

namespace quire_torch {

/// A value T (with T::parse) interned by the text it was written as. Copies are one pointer; parsing a text seen before
/// costs a length check and a memcmp.
template <class T>
class Interned {
 public:
  // Inlined: each call of an operator parses each of its texts.
  [[gnu::always_inline]] static Interned parse(std::string_view text) {
    static thread_local std::array<const Row*, 4> recent{};
    static thread_local unsigned next = 0;
    for (const Row* r : recent)
      if (r && r->text == text) return Interned(r);
    const Row* found = find_or_add(text);
    recent[next++ % recent.size()] = found;
    return Interned(found);
  }

  Interned() = default;
  /// The text as given; the schema's side of the value.
  std::string_view text() const { return row_->text; }
  const T& operator*() const { return row_->value; }
  const T* operator->() const { return &row_->value; }

 private:
  struct Row {
    std::string text;
    T value;
  };
  struct Table {
    quire::ProcessMutex mutex;
    std::deque<Row> rows;  ///< a deque never moves its elements
  };
  explicit Interned(const Row* row) : row_(row) {}

  static const Row* find_or_add(std::string_view text) {
    static constinit quire::Lazy<Table> made;
    Table& table = made.get();
    const std::lock_guard lock(table.mutex);
    for (const Row& r : table.rows)
      if (r.text == text) return &r;
    return &table.rows.emplace_back(Row{std::string(text), T::parse(text)});
  }

  const Row* row_ = nullptr;
};

/// A T that may be absent: the empty text.
template <class T>
struct Optional : std::optional<T> {
  static Optional parse(std::string_view text) { return text.empty() ? Optional{} : Optional{T::parse(text)}; }
};

/// Without specs a recipe can still say which kernels are asked.
template <>
struct Optional<quire::LinearSpec> : quire::OptionalLinearSpec {
  static Optional parse(std::string_view text) { return {quire::OptionalLinearSpec::parse(text)}; }
};

using SpecText = Interned<quire::QuantSpec>;
using OptionalSpecText = Interned<Optional<quire::QuantSpec>>;
using InputSpecText = Interned<quire::InputSpec>;
using RecipeText = Interned<quire::LinearSpec>;
using OptionalRecipeText = Interned<Optional<quire::LinearSpec>>;
using ActivationText = Interned<quire::Activation>;

}  // namespace quire_torch
