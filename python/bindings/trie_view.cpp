// explain_trie: the tree of a batch in words and as a picture, for `banyan trie explain`.
#include "banyan/trie/explain.h"
#include "convert.h"

namespace banyan::bindings {
namespace {

py::dict explain_trie(const std::vector<std::vector<int32_t>>& rows,
                      int32_t min_prefix_len,
                      int32_t min_group_size,
                      const std::string& detector,
                      int64_t max_lines,
                      const std::map<int32_t, std::string>& texts) {
  std::string text, svg;
  {
    py::gil_scoped_release release;
    std::vector<Sample> samples(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      samples[i].uid = static_cast<int64_t>(i);
      samples[i].tokens = rows[i];
    }
    trie::ExplainOptions options;
    options.detect = {.min_prefix_len = min_prefix_len, .min_group_size = min_group_size};
    options.detector = detector;
    options.max_lines = max_lines;
    text = trie::explain_text(samples, options, texts);
    svg = trie::explain_svg(samples, options, texts);
  }
  py::dict out;
  out["text"] = text;
  out["svg"] = svg;
  return out;
}

}  // namespace

void bind_trie_view(py::module_& module) {
  module.def("explain_trie",
             &explain_trie,
             py::arg("rows"),
             py::arg("min_prefix_len") = 1,
             py::arg("min_group_size") = 2,
             py::arg("detector") = "trie",
             py::arg("max_lines") = 100,
             py::arg("texts") = std::map<int32_t, std::string>(),
             "Tree, groups and rows of a batch of token ids as `text`, and a picture as `svg`.");
}

}  // namespace banyan::bindings
