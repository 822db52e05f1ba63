// The toy batch in words and as a picture, word for word where the words carry numbers.
#include "banyan/trie/explain.h"

#include <gtest/gtest.h>

#include <regex>

#include "banyan/testing/random_trie.h"

namespace banyan::trie {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Explain, TheToyBatchInWords) {
  const std::string text = explain_text(testing::toy_samples(), {});
  EXPECT_TRUE(has(text, "7 rows, 38 tokens, 17 unique: 21 saved (55.3 %), 2.24 times fewer"))
      << text;
  EXPECT_TRUE(
      has(text, "9 segments, 3 forks, 2 roots, longest path 8 tokens; query-key pairs 72 of 133"));
  EXPECT_TRUE(has(text, "3 tokens from 0, 5 rows: 1 2 3  <- row 2\n└─ 1 token from 3, 4 rows: 4\n"))
      << text;
  EXPECT_TRUE(has(text, "   │  ├─ 2 tokens from 6, 1 row: 7 8  <- row 0\n")) << text;
  EXPECT_TRUE(has(text, "   └─ 2 tokens from 4, 2 rows: 9 10  <- row 1 row 4\n")) << text;
  EXPECT_TRUE(has(text, "group 0: row 0 provides 4 tokens to row 1\n")) << text;
  EXPECT_TRUE(has(text, "kept 17 of 38 tokens, 5 of 7 rows reuse\n")) << text;
  //                     row   tokens provider reuses  group    keeps    runs
  EXPECT_TRUE(has(text, "        3        7        0        6        2      6-7        1\n"))
      << text;
  EXPECT_TRUE(has(text, "        5        3        -        0        4      0-3        3\n"))
      << text;
}

TEST(Explain, TextsOfTokensAndTheMiddleOfALongSegment) {
  std::vector<int32_t> row;
  for (int32_t i = 0; i < 20; ++i) row.push_back(i);
  EXPECT_TRUE(has(explain_text(testing::samples_from({row}), {}), "1 row: 0 1 2 3 4 5 6 ... 19"));
  const std::string text =
      explain_text(testing::samples_from({{1, 2}, {1, 3}}), {}, {{1, "Hi"}, {2, " you\n"}});
  EXPECT_TRUE(has(text, "2 rows: Hi\n"));
  EXPECT_TRUE(has(text, "1 row:  you\\n  <- row 0\n")) << text;
  EXPECT_TRUE(has(text, "1 row: 3  <- row 1\n"));
}

TEST(Explain, LimitsTheLines) {
  std::vector<std::vector<int32_t>> rows;
  for (int32_t i = 0; i < 50; ++i) rows.push_back({1, 2, 100 + i});
  ExplainOptions options;
  options.max_lines = 10;
  const std::string text = explain_text(testing::samples_from(rows), options);
  EXPECT_TRUE(has(text, "... 41 more\n\ngroups")) << text;
  EXPECT_TRUE(has(text, "... 40 more\n\nkept 52 of 150")) << text;
  options.max_lines = 0;
  EXPECT_FALSE(has(explain_text(testing::samples_from(rows), options), " more\n"));
}

TEST(Explain, NothingSharedAndNoRows) {
  EXPECT_TRUE(has(explain_text(testing::samples_from({{1}, {2}}), {}), "groups (trie)\nnone\n"));
  EXPECT_TRUE(has(explain_text({}, {}), "0 rows, 0 tokens, 0 unique: 0 saved (0.0 %)"));
  EXPECT_TRUE(has(explain_svg({}, {}), "</svg>"));
}

// One box per segment; areas: a trunk is as tall as its rows, so boxes add up to the logical
// tokens.
TEST(Explain, TheBoxesOfThePictureCoverTheLogicalTokens) {
  for (const testing::TrieCase& named : testing::trie_cases(5, 64)) {
    const std::string svg = explain_svg(named.samples, {});
    const std::regex box(
        "<rect x=\"[0-9.]+\" y=\"[0-9.]+\" width=\"[0-9.]+\" height=\"[0-9.]+\" rx=\"2\" "
        "fill=\"#[0-9a-f]+\"><title>([0-9]+) tokens, ([0-9]+) rows");
    int64_t boxes = 0, area = 0, logical = 0;
    for (std::sregex_iterator at(svg.begin(), svg.end(), box), end; at != end; ++at) {
      ++boxes;
      area += std::stoll((*at)[1]) * std::stoll((*at)[2]);
    }
    for (const Sample& sample : named.samples)
      logical += static_cast<int64_t>(sample.tokens.size());
    EXPECT_EQ(area, logical) << named.name;
    EXPECT_GT(boxes, 0);
  }
}

TEST(Explain, TextInThePictureIsEscaped) {
  const std::string svg =
      explain_svg(testing::samples_from({{1, 2}}), {}, {{1, "<a> & "}, {2, "b"}});
  EXPECT_TRUE(has(svg, "&lt;a&gt; &amp; b")) << svg;
  EXPECT_FALSE(has(svg, "<a>"));
}

}  // namespace
}  // namespace banyan::trie
