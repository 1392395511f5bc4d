// What the ranks of a group compare before they exchange tensors whose sizes follow from the number of tokens: a rank
// that gets more bytes than it expects would get no error from gloo, its process would end.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "quire_torch/ops/parallel.h"

namespace quire_torch {

/// Returns when every rank of the group has said the same, where this rank's number of tokens is another than in its
/// last call in the group, or the layer is a new one there; else at once. Throws what quire::compare_ranks throws,
/// which Python implements; without Python, or with another backend than gloo, nothing is compared. To a graph it
/// writes t, so that what is sent of t is sent afterwards.
struct Agree : OpBase {
  static constexpr const char* kName = "agree_";
  struct Args {
    op::Mutable<at::Tensor> t;
    c10::SymInt tokens, in_features, out_features;
    OptionalRecipeText recipe;
    OptionalParallelText parallel;
    static constexpr auto kFields = std::tuple{op::field<&Args::t>("t"),
                                               op::field<&Args::tokens>("tokens"),
                                               op::field<&Args::in_features>("in_features"),
                                               op::field<&Args::out_features>("out_features"),
                                               op::field<&Args::recipe>("recipe"),
                                               op::field<&Args::parallel>("parallel")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// A text as an argument, of which nothing is parsed.
struct PlainText {
  static PlainText parse(std::string_view) { return {}; }
};

/// Agree of fields that are constants of a graph: a layer's sizes where they do not follow from tokens. fields: as
/// quire::compare_fields takes them. Returns at once where the ranks of the group have said these.
struct AgreeOn : OpBase {
  static constexpr const char* kName = "agree_on_";
  struct Args {
    op::Mutable<at::Tensor> t;
    Interned<PlainText> fields, group;
    static constexpr auto kFields =
        std::tuple{op::field<&Args::t>("t"), op::field<&Args::fields>("fields"), op::field<&Args::group>("group")};
  };
  static constexpr auto kResults = op::kNoResults;
  static void run(const Args& a, const quire::Context& context);
};

/// During its life the ranks are to compare what this says, at the first agree_before() of this thread. layer: as
/// Python has said; then Python has compared too, and nothing is to do.
class Agreement {
 public:
  Agreement(const std::string& layer, Agree::Args what);
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

 private:
  std::optional<Agree::Args> outer_;
};

/// Whether gloo sends the tensors of a device for the group.
bool sent_by_gloo(std::string_view group, at::Device device);

/// The ranks compare before t, which nobody else has yet, is sent, or what is computed of it.
void agree_before(const at::Tensor& t);
/// The same of a t that others have: what to send in its place.
at::Tensor agreed(const at::Tensor& t);

/// Forgets what the ranks of a group have said, because the name is another group's now.
void forget_agreed(c10::string_view group);

}  // namespace quire_torch
