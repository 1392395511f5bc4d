// The pointers of every kind of problem, for what puts others in their place.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "quire/spec/moe_problem.h"
#include "quire/spec/pointwise_problem.h"
#include "quire/spec/state_problem.h"

namespace testdevice {

/// Copies of a problem's lists, for a kernel: the lists are gone when it runs.
using Lists = std::vector<std::shared_ptr<void>>;

/// Calls itself with every pointer of a problem, and puts in its place what `other` gives for it, such as a Launch,
/// which tells where the kernel finds that memory.
template <class Other>
class Translator {
 public:
  Translator(Other& other, Lists& lists) : other_(other), lists_(lists) {}

  template <class... Parts>
  void operator()(Parts&... parts) {
    (translate(parts), ...);
  }

 private:
  template <class T>
  void translate(T*& p) {
    p = other_(p);
  }
  void translate(quire::Matrix& m) { translate(m.data); }
  void translate(quire::MutableMatrix& m) { translate(m.data); }
  void translate(quire::Vector& v) { translate(v.data); }
  void translate(quire::Integers& i) { translate(i.data); }
  void translate(quire::RowMap& m) { translate(m.rows); }
  void translate(quire::Side& s) { (*this)(s.data, s.scale, s.amax); }
  void translate(quire::Operand& o) { (*this)(o.data, o.scale, o.amax, o.groups, o.each); }
  template <class T>
  void translate(std::optional<T>& one) {
    if (one) translate(*one);
  }
  void translate(quire::GivenAmax& a) { (*this)(a.rowwise, a.columnwise); }
  void translate(quire::Destination& d) { (*this)(d.y, d.rowwise, d.columnwise, d.scale, d.amax); }
  void translate(quire::DelayedState& s) { (*this)(s.history, s.scale, s.amax, s.reduced, s.usage); }
  void translate(quire::RowGroups& g) { translate(g.ends); }
  template <class T>
  void translate(std::span<const T>& list) {
    const auto copy = std::make_shared<std::vector<T>>(list.begin(), list.end());
    for (T& one : *copy) translate(one);
    list = *copy;
    lists_.push_back(copy);
  }

  Other& other_;
  Lists& lists_;
};

// Every pointer of a problem, and every list.
inline void parts(auto to, quire::QuantizeProblem& p) {
  to(p.x, p.rowwise, p.columnwise, p.random.state, p.random.part, p.scale, p.amax, p.groups, p.each, p.only);
}
inline void parts(auto to, quire::AmaxProblem& p) { to(p.x, p.rowwise, p.columnwise, p.groups); }
inline void parts(auto to, quire::DequantizeProblem& p) { to(p.data, p.scale, p.amax, p.out, p.groups); }
inline void parts(auto to, quire::ReorderProblem& p) { to(p.from, p.data, p.scale); }
inline void parts(auto to, quire::GemmProblem& p) { to(p.a, p.b, p.out, p.bias, p.addend, p.outs, p.biases); }
inline void parts(auto to, quire::MatmulProblem& p) {
  to(p.a, p.b, p.bias, p.out, p.groups, p.codes, p.bs, p.outs, p.biases);
}
inline void parts(auto to, quire::ColumnSumProblem& p) { to(p.x, p.out, p.groups); }
inline void parts(auto to, quire::NormProblem& p) { to(p.x, p.gamma, p.beta, p.out, p.mean, p.rstd); }
inline void parts(auto to, quire::NormGradProblem& p) {
  to(p.dy, p.x, p.gamma, p.mean, p.rstd, p.dx, p.dgamma, p.dbeta);
}
inline void parts(auto to, quire::ActivationProblem& p) { to(p.x, p.out, p.groups); }
inline void parts(auto to, quire::ActivationGradProblem& p) { to(p.dy, p.x, p.dx, p.groups); }
inline void parts(auto to, quire::RouteProblem& p) { to(p.logits, p.bias, p.weights, p.ids); }
inline void parts(auto to, quire::RouteGradProblem& p) { to(p.logits, p.ids, p.dweights, p.dlogits); }
inline void parts(auto to, quire::CapacityProblem& p) { to(p.ids, p.kept); }
inline void parts(auto to, quire::PermuteProblem& p) { to(p.from, p.map, p.weights, p.to); }
inline void parts(auto to, quire::UnpermuteProblem& p) { to(p.from, p.map, p.weights, p.to); }
inline void parts(auto to, quire::PermutedDotProblem& p) { to(p.permuted, p.tokens, p.map, p.to); }
inline void parts(auto to, quire::ExpertRowsProblem& p) { to(p.ids, p.row_map, p.offsets); }
inline void parts(auto to, quire::ChunkRowsProblem& p) { to(p.sizes, p.order, p.row_map); }
inline void parts(auto to, quire::FingerprintProblem& p) { to(p.x, p.to, p.expected, p.groups, p.each, p.only); }
inline void parts(auto to, quire::AdvanceProblem& p) { to(p.value); }
inline void parts(auto to, quire::MaximumProblem& p) { to(p.to, p.values); }
inline void parts(auto to, quire::CollectProblem& p) { to(p.amax, p.of_x, p.of_w, p.number, p.rule); }
inline void parts(auto to, quire::DelayedUpdateProblem& p) { to(p.states, p.rules); }

}  // namespace testdevice
