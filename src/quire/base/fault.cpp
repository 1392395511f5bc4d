#include "quire/base/fault.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

namespace quire {
namespace {

static_assert(std::is_trivially_copyable_v<FaultRecord> && std::is_standard_layout_v<FaultRecord>);

constexpr std::array kRuleTexts{
    RuleText{ValueRule::given_scale, "given_scale",
             " must be positive and finite; got {number}; load the static scale"},
    RuleText{ValueRule::given_amax, "given_amax",
             ": a given amax must not be negative or NaN; got {number}; calibrate it, or leave it out"},
    RuleText{ValueRule::group_end, "group_end",
             ": offsets must not decrease and be from 0 to {limit}, the number of rows of x; group {index} ends at "
             "{value}, the one before at {more0}; offsets is the cumulative sum of the groups' sizes, which must "
             "not be negative and add up to {limit} at most"},
    RuleText{ValueRule::group_room, "group_room",
             " for {more0} groups of {more1} rows of {more2} must hold {limit} elements, got {value}; pass "
             "what the forward operator returned"},
    RuleText{ValueRule::expert_id, "expert_id",
             ": topk_ids must be numbers of experts, from 0 to {last}, or -1 for none; got {value} at place {index}"},
    RuleText{ValueRule::chosen_expert, "chosen_expert",
             ": topk_ids must be those that route_fwd returned, got {value} at place {index}"},
    RuleText{ValueRule::row_map, "row_map",
             ": row_map must hold rows from 0 to {last}, or -1 for none; got {value} at token {index}, slot "
             "{more0}; there are {limit} rows: pass permute a larger num_rows, or unpermute the row_map that "
             "permute returned"},
    RuleText{ValueRule::row_once, "row_once",
             ": row_map must not name a row twice; got row {value} at places {more0} and {index}"},
    RuleText{ValueRule::chunk_size, "chunk_size",
             ": sizes must not be negative and have a sum of at most the number of rows, {limit}; got {value} after "
             "chunks of {more0} rows"},
    RuleText{ValueRule::chunk_order, "chunk_order", ": order must hold each of the numbers from 0 to {last} once"},
    RuleText{ValueRule::chunk_rows, "chunk_rows", ": rows must be fewer than 2^31, got {value} with align={more0}"},
    RuleText{ValueRule::stale_codes, "stale_codes",
             ": the weight has changed since it was quantized, so its cached codes are stale; quantize it again "
             "(quire.quantize_weights, or is_first_microbatch=True)"},
    RuleText{ValueRule::history_length, "history_length",
             ": a rule's length must be from 1 to the rows of the history, {limit}; got {number}"},
};

constexpr bool in_order() {
  for (size_t i = 0; i < kRuleTexts.size(); ++i)
    if (static_cast<size_t>(kRuleTexts[i].rule) != i + 1) return false;
  return true;
}
static_assert(in_order() && static_cast<size_t>(ValueRule::history_length) == kRuleTexts.size(), "a row for each rule");

std::string number_named(std::string_view name, const Fault& f) {
  if (name == "index") return text(f.index);
  if (name == "value") return text(f.value);
  if (name == "number") return text(f.number);
  if (name == "limit") return text(f.limit);
  if (name == "last") return text(f.limit - 1);
  return text(f.more.at(static_cast<size_t>(name.back() - '0')));
}

std::atomic_ref<uint32_t> atomic(uint32_t& word) { return std::atomic_ref(word); }

}  // namespace

FaultError::FaultError(std::string_view op, ValueRule broken, const Fault& found)
    : Error(describe(op, broken, found)), operation(op), rule(broken), fault(found) {}

void raise(std::string_view operation, ValueRule rule, const Fault& fault) { throw FaultError(operation, rule, fault); }

std::string describe(std::string_view operation, ValueRule rule, const Fault& fault) {
  std::string out(operation);
  const auto row = std::ranges::find(kRuleTexts, rule, &RuleText::rule);
  if (row == kRuleTexts.end()) return text(operation, ": a value breaks rule ", static_cast<uint32_t>(rule));
  std::string_view rest = row->text;
  for (size_t open; (open = rest.find('{')) != rest.npos;) {
    const size_t close = rest.find('}');
    out += text(rest.substr(0, open), number_named(rest.substr(open + 1, close - open - 1), fault));
    rest.remove_prefix(close + 1);
  }
  return out += rest;
}

void report(FaultRecord& record, std::string_view operation, ValueRule rule, const Fault& fault) {
  uint32_t heard = atomic(record.heard).load(std::memory_order_acquire);
  if (!atomic(record.claim ? *record.claim : record.own_claim).compare_exchange_strong(heard, heard + 1)) return;
  record.fault = fault;
  record.operation = {};
  operation.copy(record.operation.data(), record.operation.size() - 1);
  atomic(record.rule).store(static_cast<uint32_t>(rule), std::memory_order_release);
}

void raise_reported(FaultRecord& record) {
  if (atomic(record.rule).load(std::memory_order_relaxed) == 0) return;
  // Whoever takes the rule has the record, in which nobody writes before this fault counts as heard.
  const auto rule = static_cast<ValueRule>(atomic(record.rule).exchange(0, std::memory_order_acquire));
  if (rule == ValueRule::none) return;
  const FaultError error(record.operation.data(), rule, record.fault);
  atomic(record.heard).fetch_add(1, std::memory_order_release);
  throw error;
}

std::span<const RuleText> rule_texts() { return kRuleTexts; }

}  // namespace quire
