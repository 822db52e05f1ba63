// A parser by recursive descent that builds the network as it reads. An item that is repeated a
// number of times is read as often, from the same place.
#include "banyan/rollout/grammar/ebnf.h"

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "banyan/core/error.h"
#include "banyan/rollout/grammar/scanner.h"

namespace banyan::rollout::grammar {
namespace {

constexpr int32_t kMaxDepth = 64;  // of brackets

class Reader {
 public:
  explicit Reader(std::string_view text) : in_(text) {}

  Network read() {
    in_.skip();
    while (!in_.done()) read_rule();
    for (const Rule& rule : net_.rules) {
      BANYAN_CHECK(rule.begin >= 0, "[grammar] wanted a rule '", rule.name, "', got none");
    }
    const auto root = by_name_.find("root");
    BANYAN_CHECK(root != by_name_.end(), "[grammar] wanted a rule root (root ::= ...), got none");
    net_.root = root->second;
    return std::move(net_);
  }

 private:
  int32_t rule_of(std::string_view named) {
    const auto [found, is_new] =
        by_name_.emplace(std::string(named), static_cast<int32_t>(net_.rules.size()));
    if (is_new) net_.rules.push_back({.name = found->first});
    return found->second;
  }

  // Whether "name ::=" stands here, where the rule before ends.
  bool at_rule() {
    const size_t before = in_.place();
    const bool named = !in_.name().empty();
    in_.skip();
    const bool found = named && in_.takes("::=");
    in_.go_back(before);
    return found;
  }

  void read_rule() {
    if (!at_rule()) in_.fail("a rule (name ::= ...)");
    const int32_t rule = rule_of(in_.name());
    if (net_.rules[rule].begin >= 0) in_.fail("each rule once");
    in_.skip();
    in_.takes("::=");
    in_.skip();
    const Part part = alternatives(0);
    net_.rules[rule].begin = part.begin;
    net_.rules[rule].end = part.end;
    if (!in_.done() && !at_rule()) in_.fail("a rule or its end");
  }

  Part alternatives(int32_t depth) {
    if (depth > kMaxDepth) in_.fail("brackets <= 64 deep");
    const Part whole{net_.add_node(), net_.add_node()};
    do {
      in_.skip();
      const Part one = sequence(depth);
      net_.join(whole.begin, one.begin);
      net_.join(one.end, whole.end);
    } while (in_.takes("|"));
    return whole;
  }

  Part sequence(int32_t depth) {
    Part whole = empty();
    while (!in_.done() && in_.peek() != '|' && in_.peek() != ')' && !at_rule()) {
      append(whole, repeated(depth));
      in_.skip();
    }
    return whole;
  }

  // An item and how often it stands there.
  Part repeated(int32_t depth) {
    const size_t begin = in_.place();
    const Part first = item(depth);
    int32_t least = 1;
    std::optional<int32_t> most;
    if (in_.takes("*")) {
      least = 0;
    } else if (in_.takes("?")) {
      least = 0, most = 1;
    } else if (in_.takes("{")) {
      least = in_.count(), most = least;
      if (in_.takes(",")) most = in_.peek() == '}' ? std::nullopt : std::optional(in_.count());
      if (!in_.takes("}") || (most && *most < least)) in_.fail("{m}, {m,} or {m,n}");
    } else if (!in_.takes("+")) {
      return first;
    }
    const size_t after = in_.place();
    bool is_used = false;  // the item that was read
    const auto one = [&] {
      if (!std::exchange(is_used, true)) return first;
      in_.go_back(begin);
      return item(depth);
    };
    Part whole = empty();
    for (int32_t i = 0; i < least; ++i) append(whole, one());
    const int32_t last = net_.add_node();
    for (int32_t i = least; most && i < *most; ++i) {
      net_.join(whole.end, last);
      append(whole, one());
    }
    if (!most) {
      const Part loop = one();
      net_.join(whole.end, loop.begin);
      net_.join(loop.end, whole.end);
    }
    net_.join(whole.end, last);
    in_.go_back(after);
    return {whole.begin, last};
  }

  Part empty() {
    const int32_t node = net_.add_node();
    return {node, node};
  }

  void append(Part& whole, const Part& next) {
    net_.join(whole.end, next.begin);
    whole.end = next.end;
  }

  Part item(int32_t depth) {
    if (in_.peek() == '"' || in_.peek() == '\'') return literal();
    if (in_.takes("[")) return net_.add_letters(in_.letter_class());
    if (in_.takes(".")) return net_.add_letters({{0, kMaxCode}});
    if (in_.takes("(")) {
      if (in_.peek() == '=' || in_.peek() == '?') in_.fail("no look-ahead");
      const Part part = alternatives(depth + 1);
      if (!in_.takes(")")) in_.fail("')'");
      return part;
    }
    const std::string_view named = in_.name();
    if (named.empty()) in_.fail("text in quotes, [letters], a rule or (...)");
    const Part part{net_.add_node(), net_.add_node()};
    net_.add_edge(part.begin, {.kind = Edge::Kind::kRule, .rule = rule_of(named), .to = part.end});
    return part;
  }

  Part literal() {
    const char quote = in_.peek();
    in_.takes(std::string_view(&quote, 1));
    Part whole = empty();
    while (!in_.takes(std::string_view(&quote, 1))) {
      if (in_.done() || in_.peek() == '\n') in_.fail("the end of the text in quotes");
      const uint32_t code = in_.letter();
      append(whole, net_.add_letters({{code, code}}));
    }
    return whole;
  }

  Scanner in_;
  Network net_;
  std::map<std::string, int32_t, std::less<>> by_name_;
};

}  // namespace

Network read_ebnf(std::string_view text) { return Reader(text).read(); }

}  // namespace banyan::rollout::grammar
