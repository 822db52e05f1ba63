// Operator slots from Python: an op of a slot is a dict of callables with the op's own signature
// (ops/slots.h), replaced or wrapped by name. python/banyan/feature/ turns functions of the user
// into such dicts.
//
// Calls come from training threads without the GIL: each takes it, hands over what the core has,
// and gives it up again while an op of the core runs.
#include <optional>
#include <tuple>

#include "banyan/core/error.h"
#include "banyan/feature/running.h"
#include "banyan/ops/expert_slots.h"
#include "banyan/ops/slots.h"
#include "callable.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

using namespace ops;

// --- one value ---

template <typename T>
py::object to_object(T&& value) {
  using Plain = std::decay_t<T>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    return value.defined() ? py::cast(value) : py::none();
  } else if constexpr (std::is_same_v<Plain, HeadMemory*>) {
    return value == nullptr ? py::none() : py::cast(value, py::return_value_policy::reference);
  } else if constexpr (std::is_same_v<Plain, ExpertWeights> ||
                       std::is_same_v<Plain, std::vector<at::Tensor*>>) {
    py::list out;
    for (const auto* entry : value) out.append(to_object(*entry));
    return out;
  } else {
    return py::cast(Plain(value));  // a copy: structs of tensors are cheap, and may be kept
  }
}

// An argument while the call lasts; None is an undefined tensor or a null pointer.
template <typename T>
struct Argument {
  explicit Argument(py::handle value) : value(value.cast<std::decay_t<T>>()) {}
  T get() { return static_cast<T>(value); }
  std::decay_t<T> value;
};
template <typename T>
  requires std::is_same_v<std::decay_t<T>, at::Tensor>
struct Argument<T> {
  explicit Argument(py::handle of) : value(of.is_none() ? at::Tensor() : of.cast<at::Tensor>()) {}
  T get() { return value; }
  at::Tensor value;
};
// Lists of what the core has by pointer.
template <typename Value, typename Pointer>
struct ListArgument {
  explicit ListArgument(py::handle of) : values(of.cast<std::vector<Value>>()) {
    for (Value& value : values) pointers.push_back(&value);
  }
  std::vector<Pointer>& get() { return pointers; }
  std::vector<Value> values;
  std::vector<Pointer> pointers;
};
template <>
struct Argument<const ExpertWeights&> : ListArgument<LinearWeight, const LinearWeight*> {
  using ListArgument::ListArgument;
};
template <>
struct Argument<const std::vector<at::Tensor*>&> : ListArgument<at::Tensor, at::Tensor*> {
  using ListArgument::ListArgument;
};
template <>
struct Argument<HeadMemory*> {
  explicit Argument(py::handle of) : value(of.is_none() ? nullptr : of.cast<HeadMemory*>()) {}
  HeadMemory* get() { return value; }
  HeadMemory* value;
};

// --- one function ---

template <typename R, typename... A, size_t... I>
py::object call_core(const std::function<R(A...)>& function,
                     const py::args& given,
                     std::index_sequence<I...> /*indices*/) {
  std::tuple<Argument<A>...> arguments{Argument<A>(py::object(given[I]))...};
  if constexpr (std::is_void_v<R>) {
    const py::gil_scoped_release release;
    function(std::get<I>(arguments).get()...);
    return py::none();
  } else {
    std::optional<R> result;
    {
      const py::gil_scoped_release release;
      result.emplace(function(std::get<I>(arguments).get()...));
    }
    return to_object(*result);
  }
}

template <typename R, typename... A>
py::object to_python(const std::function<R(A...)>& function) {
  return py::cpp_function([function](const py::args& given) {
    BANYAN_CHECK(given.size() == sizeof...(A),
                 "[feature] inner op: wanted ",
                 sizeof...(A),
                 " arguments, as they came, got ",
                 given.size());
    return call_core(function, given, std::index_sequence_for<A...>{});
  });
}

template <typename R, typename... A>
void from_python(const py::object& callable, std::function<R(A...)>& function) {
  function = [held = hold(callable)](A... arguments) -> R {
    const py::gil_scoped_acquire acquire;
    const py::object result = (*held)(to_object(arguments)...);
    if constexpr (!std::is_void_v<R>) return Argument<R>(result).get();
  };
}

// --- one op ---

template <typename Op>
struct Fields {  // most ops have a forward and a backward
  template <typename Visit>
  static void each(Op& op, const Visit& visit) {
    visit("forward", op.forward);
    visit("backward", op.backward);
  }
};
template <typename Op>
  requires std::is_same_v<Op, LinearOp> || std::is_same_v<Op, GroupedGemmOp>
struct Fields<Op> {
  template <typename Visit>
  static void each(Op& op, const Visit& visit) {
    visit("forward", op.forward);
    visit("backward_input", op.backward_input);
    visit("backward_weight", op.backward_weight);
  }
};
template <typename Op>
  requires std::is_same_v<Op, RouterOp> || std::is_same_v<Op, PermuteOp> ||
           std::is_same_v<Op, UnpermuteOp>
struct Fields<Op> {
  template <typename Visit>
  static void each(Op& op, const Visit& visit) {
    visit("forward", op.forward);
  }
};

template <typename Op>
py::dict dict_of(Op op) {
  py::dict out;
  Fields<Op>::each(
      op, [&](const char* name, const auto& function) { out[name] = to_python(function); });
  return out;
}

template <typename Op>
Op op_of(const py::dict& functions) {
  Op op;
  Fields<Op>::each(op, [&](const char* name, auto& function) {
    BANYAN_CHECK(functions.contains(name), "[feature] op: wanted a function '", name, "'");
    from_python(functions[name], function);
  });
  return op;
}

// --- one slot ---

// fn(slot) of the slot with this name, in its own type.
template <typename Function>
void with_slot(const std::string& name, const Function& fn) {
  const feature::SlotBase* slot = &slot_table().get(name);
  const auto visit = [&](auto& typed) {
    if (slot == &typed) fn(typed);
  };
  visit(attention_slot());
  visit(rms_norm_slot());
  visit(rope_slot());
  visit(swiglu_slot());
  visit(linear_slot());
  visit(embedding_slot());
  visit(cross_entropy_slot());
  visit(value_head_slot());
  visit(router_slot());
  visit(grouped_gemm_slot());
  visit(permute_slot());
  visit(unpermute_slot());
}

void replace(const std::string& slot,
             const std::string& owner,
             const py::dict& functions,
             bool force) {
  with_slot(slot, [&]<typename Op>(feature::OpSlot<Op>& typed) {
    typed.replace(owner, op_of<Op>(functions), force);
  });
}

bool wrap(const std::string& slot,
          const std::string& owner,
          const std::string& name,
          const py::object& wrapper) {
  bool added = false;
  with_slot(slot, [&]<typename Op>(feature::OpSlot<Op>& typed) {
    added = typed.wrap(owner, name, [held = hold(wrapper)](const Op& inner) {
      const py::gil_scoped_acquire acquire;
      return op_of<Op>((*held)(dict_of<Op>(inner)).template cast<py::dict>());
    });
  });
  return added;
}

void bind_values(py::module_& module) {
  py::class_<ComputeOptions>(module, "ComputeOptions", "How an op computes; to be passed on.");
  py::class_<HeadMemory>(module, "HeadMemory", "What the head keeps; to be passed on.");
  py::class_<LinearWeight>(module, "LinearWeight", "A weight [out, in], possibly packed.")
      .def_readonly("out", &LinearWeight::out)
      .def_readonly("in_", &LinearWeight::in)
      .def("tensor", &plain_weight, "[out, in] in the compute dtype; a copy where it is packed.");
  py::class_<ValueHeadWeight>(module, "ValueHeadWeight", "weight [1, E], bias [1] or None.")
      .def_property_readonly("weight", [](const ValueHeadWeight& head) { return head.weight; })
      .def_property_readonly("bias",
                             [](const ValueHeadWeight& head) { return to_object(head.bias); });
  py::class_<SwigluGradients>(module, "SwigluGradients", "d(gate_up), and y once more.")
      .def(py::init([](const at::Tensor& gate_up, const at::Tensor& y) {
        return SwigluGradients{gate_up, y};
      }))
      .def_readonly("gate_up", &SwigluGradients::gate_up)
      .def_readonly("y", &SwigluGradients::y);
  py::class_<EdgeIndex>(module,
                        "EdgeIndex",
                        "Edges by row: row_offsets [R + 1], token [X]; with is_part the head holds "
                        "a run of the vocabulary and "
                        "-1 is a token outside it.")
      .def_readonly("row_offsets", &EdgeIndex::row_offsets)
      .def_readonly("token", &EdgeIndex::token)
      .def_readonly("is_part", &EdgeIndex::is_part);
  py::class_<EdgeLogprob>(module, "EdgeLogprob", "logprob [X], lse [R], entropy [R] or None.")
      .def(
          py::init([](const at::Tensor& logprob, const at::Tensor& lse, const py::object& entropy) {
            return EdgeLogprob{logprob, lse, Argument<at::Tensor>(entropy).get()};
          }))
      .def_readonly("logprob", &EdgeLogprob::logprob)
      .def_readonly("lse", &EdgeLogprob::lse)
      .def_property_readonly("entropy",
                             [](const EdgeLogprob& of) { return to_object(of.entropy); });
}

void bind_attention(py::module_& module) {
  py::class_<AttentionCall>(module, "AttentionCall", "One call of attention; good while it runs.")
      .def_readonly("layer", &AttentionCall::layer)
      .def_readwrite("q", &AttentionCall::q, "[T, H, D]")
      .def_readwrite("k", &AttentionCall::k, "[C + T, K, D], C carried tokens first")
      .def_readwrite("v", &AttentionCall::v)
      .def_readonly("parent", &AttentionCall::parent, "[C + T] int32, -1 at a root")
      .def_readwrite("scale", &AttentionCall::scale);
  py::class_<AttentionResult>(module, "AttentionResult", "out [T, H, D], lse [T, H] or None.")
      .def(py::init([](const at::Tensor& out, const py::object& lse) {
             return AttentionResult{out, Argument<at::Tensor>(lse).get()};
           }),
           py::arg("out"),
           py::arg("lse") = py::none())
      .def_readonly("out", &AttentionResult::out)
      .def_property_readonly("lse", [](const AttentionResult& of) { return to_object(of.lse); });
  py::class_<AttentionSlotGradients>(module, "AttentionSlotGradients", "dq, dk and dv of a call.")
      .def(py::init([](const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv) {
        return AttentionSlotGradients{dq, dk, dv};
      }))
      .def_readonly("dq", &AttentionSlotGradients::dq)
      .def_readonly("dk", &AttentionSlotGradients::dk)
      .def_readonly("dv", &AttentionSlotGradients::dv);
}

void bind_experts(py::module_& module) {
  py::class_<ExpertRows>(module, "ExpertRows", "Rows by expert: token [S], slot [T, k].")
      .def_readonly("source", &ExpertRows::source)
      .def_readonly("token", &ExpertRows::token)
      .def_readonly("slot", &ExpertRows::slot)
      .def_readonly("offsets", &ExpertRows::offsets);
  py::class_<RouterOptions>(module, "RouterOptions", "How many experts a token has.")
      .def_readonly("num_chosen", &RouterOptions::num_chosen)
      .def_readonly("renormalise", &RouterOptions::renormalise);
  py::class_<Routing>(module, "Routing", "logits [T, X], choice [T, k] int64.")
      .def(py::init([](const at::Tensor& logits, const at::Tensor& choice) {
        return Routing{logits, choice};
      }))
      .def_readonly("logits", &Routing::logits)
      .def_readonly("choice", &Routing::choice);
}

}  // namespace

void bind_feature(py::module_& module) {
  py::module_ slots = module.def_submodule("slots", "Operator slots (ops/slots.h).");
  bind_values(slots);
  bind_attention(slots);
  bind_experts(slots);
  slots.def(
      "names",
      [] {
        std::vector<std::string> names;
        for (const feature::SlotBase* slot : slot_table().slots()) names.push_back(slot->name());
        return names;
      },
      "All slots.");
  slots.def(
      "check",
      [](const std::string& name) { slot_table().get(name); },
      py::arg("slot"),
      "Raises ValueError with the nearest name for a slot that there is not.");
  slots.def("replace",
            &replace,
            py::arg("slot"),
            py::arg("owner"),
            py::arg("functions"),
            py::arg("force") = false,
            "Registers a replacement: {'forward': ..., 'backward': ...}.");
  slots.def("wrap",
            &wrap,
            py::arg("slot"),
            py::arg("owner"),
            py::arg("name"),
            py::arg("wrapper"),
            "Registers wrapper(inner functions) -> functions; False if it is there already.");
  slots.def(
      "remove",
      [](const std::string& owner) { return slot_table().remove(owner); },
      py::arg("owner"),
      "Takes out what an owner registered, everywhere; the number of entries.");
  slots.def(
      "remove_wrapper",
      [](const std::string& slot, const std::string& name) {
        slot_table().get(slot).remove_wrapper(name);
      },
      py::arg("slot"),
      py::arg("name"));
  slots.def("remove_all", [] { slot_table().remove_all(); });
  slots.def(
      "apply",
      [] { return slot_table().apply(); },
      "Puts what is registered into force: now, or (False) when the step under way has ended.");
  slots.def("dump", [] { return slot_table().dump(); }, "A line per changed slot.");
  slots.def("is_running", &feature::is_running, "True within a step or a pass.");
}

}  // namespace banyan::bindings
