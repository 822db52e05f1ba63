#include "banyan/train/detail/least_squares.h"

#include <cmath>
#include <limits>
#include <utility>

#include "banyan/core/error.h"

namespace banyan::train::detail {
namespace {

using Matrix = std::vector<std::vector<double>>;

// Solves a x = b by elimination with row exchange; false where a pivot is nearly zero.
bool solve(Matrix a, std::vector<double> b, std::vector<double>& x) {
  const size_t n = b.size();
  for (size_t column = 0; column < n; ++column) {
    size_t pivot = column;
    for (size_t row = column + 1; row < n; ++row) {
      if (std::abs(a[row][column]) > std::abs(a[pivot][column])) pivot = row;
    }
    if (std::abs(a[pivot][column]) < 1e-12) return false;
    std::swap(a[pivot], a[column]);
    std::swap(b[pivot], b[column]);
    for (size_t row = column + 1; row < n; ++row) {
      const double factor = a[row][column] / a[column][column];
      for (size_t k = column; k < n; ++k) a[row][k] -= factor * a[column][k];
      b[row] -= factor * b[column];
    }
  }
  x.assign(n, 0.0);
  for (size_t row = n; row-- > 0;) {
    double sum = b[row];
    for (size_t k = row + 1; k < n; ++k) sum -= a[row][k] * x[k];
    x[row] = sum / a[row][row];
  }
  return true;
}

double squared_error(const Matrix& rows,
                     const std::vector<double>& targets,
                     const std::vector<double>& x) {
  double sum = 0.0;
  for (size_t i = 0; i < rows.size(); ++i) {
    double error = -targets[i];
    for (size_t j = 0; j < x.size(); ++j) error += rows[i][j] * x[j];
    sum += error * error;
  }
  return sum;
}

// The columns `set` (bits) of the rows, least squares; false where not determined or negative.
bool fit(const Matrix& rows,
         const std::vector<double>& targets,
         unsigned set,
         std::vector<double>& x) {
  std::vector<size_t> columns;
  for (size_t j = 0; j < x.size(); ++j) {
    if ((set >> j & 1u) != 0) columns.push_back(j);
  }
  Matrix normal(columns.size(), std::vector<double>(columns.size(), 0.0));
  std::vector<double> right(columns.size(), 0.0);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t a = 0; a < columns.size(); ++a) {
      right[a] += rows[i][columns[a]] * targets[i];
      for (size_t b = 0; b < columns.size(); ++b) {
        normal[a][b] += rows[i][columns[a]] * rows[i][columns[b]];
      }
    }
  }
  std::vector<double> found;
  if (!solve(normal, right, found)) return false;
  std::fill(x.begin(), x.end(), 0.0);
  for (size_t a = 0; a < columns.size(); ++a) {
    if (found[a] < 0.0) return false;
    x[columns[a]] = found[a];
  }
  return true;
}

}  // namespace

std::vector<double> non_negative_least_squares(const Matrix& rows,
                                               const std::vector<double>& targets) {
  BANYAN_ASSERT(
      !rows.empty() && rows.size() == targets.size() && !rows[0].empty() && rows[0].size() <= 8,
      "least squares: rows ",
      rows.size(),
      ", targets ",
      targets.size());
  const size_t n = rows[0].size();
  // Columns of one size, so that "nearly zero" means the same for each.
  std::vector<double> scale(n, 0.0);
  for (const std::vector<double>& row : rows) {
    for (size_t j = 0; j < n; ++j) scale[j] += row[j] * row[j];
  }
  Matrix scaled = rows;
  for (std::vector<double>& row : scaled) {
    for (size_t j = 0; j < n; ++j) row[j] = scale[j] > 0.0 ? row[j] / std::sqrt(scale[j]) : 0.0;
  }
  std::vector<double> best(n, 0.0);
  double least = squared_error(scaled, targets, best);
  for (unsigned set = 1; set < 1u << n; ++set) {
    std::vector<double> x(n, 0.0);
    if (!fit(scaled, targets, set, x)) continue;
    const double error = squared_error(scaled, targets, x);
    if (error >= least) continue;
    least = error;
    best = std::move(x);
  }
  for (size_t j = 0; j < n; ++j) {
    if (scale[j] > 0.0) best[j] /= std::sqrt(scale[j]);
  }
  return best;
}

}  // namespace banyan::train::detail
