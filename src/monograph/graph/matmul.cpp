// Products of small fp32 matrices for processors with AVX-512; the sums of a tile stay in registers.
//
// Shapes: N rows, K summed (the depth), M columns; a tile is ROWS x COLUMNS of the product, a panel DEPTH x COLUMNS of
// the right operand.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <vector>

namespace {

constexpr long LANES = 16, ROWS = 8, COLUMNS = 2 * LANES;
// A panel is 16 KiB, so that it fits the L1 cache together with a tile's rows of the left operand.
constexpr long DEPTH = 128;
// Row stride in elements above which a panel is copied before it is read: parts of it would otherwise evict one another
// from the L1 cache, whose sets are chosen by address.
constexpr long MAX_STRIDE_IN_PLACE = 512;
// Number of multiplications from which waking other threads is worth it.
constexpr long MIN_FOR_THREADS = 1 << 21;
// In `grouped`, the most rows of a task, which a thread multiplies by its group's matrix. Each task copies the panels.
constexpr long CHUNK = 192;

struct Matrix {
    const float* data;
    long row, column;  // strides in elements
    const float* at(long i, long j) const { return data + i * row + j * column; }
};

// out[R, COLUMNS] = left[R, depth] @ right[depth, COLUMNS], or += if `add`; the right operand's rows are contiguous.
template <long R>
void tile(long depth, Matrix left, Matrix right, float* out, long stride, bool add) {
    __m512 sums[R][2];
    for (long i = 0; i < R; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (long k = 0; k < depth; ++k) {
        const float* b = right.data + k * right.row;
        const __m512 low = _mm512_loadu_ps(b), high = _mm512_loadu_ps(b + LANES);
#pragma GCC unroll 8
        for (long i = 0; i < R; ++i) {
            const __m512 x = _mm512_set1_ps(*left.at(i, k));
            sums[i][0] = _mm512_fmadd_ps(x, low, sums[i][0]);
            sums[i][1] = _mm512_fmadd_ps(x, high, sums[i][1]);
        }
    }
    for (long i = 0; i < R; ++i)
        for (long h = 0; h < 2; ++h) {
            float* at = out + i * stride + h * LANES;
            _mm512_storeu_ps(at, add ? _mm512_add_ps(_mm512_loadu_ps(at), sums[i][h]) : sums[i][h]);
        }
}

// Computes as many tiles of R rows as fit from row `i` of [rows, width]; returns the first row that is not computed.
template <long R>
long tiles(long i, long rows, long width, long depth, Matrix left, Matrix right, float* out, long stride, bool add) {
    for (; i + R <= rows; i += R) {
        const Matrix left_rows{left.at(i, 0), left.row, left.column};
        if (width == COLUMNS) {
            tile<R>(depth, left_rows, right, out + i * stride, stride, add);
            continue;
        }
        // The last columns are fewer than a tile has. So the tile is computed in a buffer of its own, and only the part
        // that belongs to the product is copied or added.
        float edge[R * COLUMNS];
        tile<R>(depth, left_rows, right, edge, COLUMNS, false);
        for (long r = 0; r < R; ++r)
            for (long j = 0; j < width; ++j) {
                float& at = out[(i + r) * stride + j];
                at = add ? at + edge[r * COLUMNS + j] : edge[r * COLUMNS + j];
            }
    }
    return i;
}

// panel[depth, COLUMNS] = right[depth, width], padded with columns of zeros.
void copy(long depth, long width, Matrix right, float* panel) {
    if (right.column == 1 && width == COLUMNS)
        for (long k = 0; k < depth; ++k) std::copy_n(right.at(k, 0), COLUMNS, panel + k * COLUMNS);
    else
        for (long j = 0; j < COLUMNS; ++j)
            for (long k = 0; k < depth; ++k) panel[k * COLUMNS + j] = j < width ? *right.at(k, j) : 0.0f;
}

// out[rows, columns], contiguous, = left[rows, depth] @ right[depth, columns], by one thread.
void multiply(long rows, long depth, long columns, Matrix left, Matrix right, float* out) {
    float panel[DEPTH * COLUMNS];
    for (long j = 0; j < columns; j += COLUMNS)
        for (long k = 0; k < depth; k += DEPTH) {
            const long width = std::min(COLUMNS, columns - j), panel_depth = std::min(DEPTH, depth - k);
            Matrix b{right.at(k, j), right.row, right.column};
            if (b.column != 1 || b.row > MAX_STRIDE_IN_PLACE || width < COLUMNS) {
                copy(panel_depth, width, b, panel);
                b = {panel, COLUMNS, 1};
            }
            const Matrix a{left.at(0, k), left.row, left.column};
            long i = tiles<ROWS>(0, rows, width, panel_depth, a, b, out + j, columns, k > 0);
            tiles<1>(i, rows, width, panel_depth, a, b, out + j, columns, k > 0);
        }
}

}  // namespace

// out[B, N, M], contiguous, = left[B, N, K] @ right[B, K, M] with any strides; threads share out the batch.
extern "C" void batched(long batch, long rows, long depth, long columns, const float* left, long left_batch,
                        long left_row, long left_column, const float* right, long right_batch, long right_row,
                        long right_column, float* out) {
    const long threads = batch * rows * depth * columns < MIN_FOR_THREADS ? 1 : omp_get_max_threads();
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long b = 0; b < batch; ++b)
        multiply(rows, depth, columns, {left + b * left_batch, left_row, left_column},
                 {right + b * right_batch, right_row, right_column}, out + b * rows * columns);
}

// out[N, M], contiguous, = left[N, K] @ right[K, M] with any strides; threads share out the rows.
extern "C" void matmul(long rows, long depth, long columns, const float* left, long left_row, long left_column,
                       const float* right, long right_row, long right_column, float* out) {
    const long threads = rows * depth * columns < MIN_FOR_THREADS ? 1 : omp_get_max_threads();
    // A thread's share of the rows, rounded up to whole tiles.
    const long share = ((rows + threads - 1) / threads + ROWS - 1) / ROWS * ROWS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < rows; i += share)
        multiply(std::min(share, rows - i), depth, columns, {left + i * left_row, left_row, left_column},
                 {right, right_row, right_column}, out + i * columns);
}

// out[P, M], contiguous: rows ends[e - 1] to ends[e] of left[P, K] @ right[e] of right[E, K, M], with any strides.
extern "C" void grouped(long groups, const int* ends, long depth, long columns, const float* left, long left_row,
                        long left_column, const float* right, long right_group, long right_row, long right_column,
                        float* out) {
    struct Task {
        long group, begin, rows;
    };
    std::vector<Task> tasks;
    long group_begin = 0;
    for (long e = 0; e < groups; ++e) {
        for (long i = group_begin; i < ends[e]; i += CHUNK) tasks.push_back({e, i, std::min(CHUNK, ends[e] - i)});
        group_begin = ends[e];
    }
    const long threads = ends[groups - 1] * depth * columns < MIN_FOR_THREADS ? 1 : omp_get_max_threads();
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (const Task& task : tasks)
        multiply(task.rows, depth, columns, {left + task.begin * left_row, left_row, left_column},
                 {right + task.group * right_group, right_row, right_column}, out + task.begin * columns);
}

// out[E, N, M], contiguous: left[rows].T @ right[rows] for each group's rows of left[P, N] and right[P, M].
extern "C" void grouped_outer(long groups, const int* ends, long rows, long columns, const float* left, long left_row,
                              long left_column, const float* right, long right_row, long right_column, float* out) {
    const long threads = ends[groups - 1] * rows * columns < MIN_FOR_THREADS ? 1 : omp_get_max_threads();
    // A task is a share of the output's rows for one group.
    const long share = (rows + threads - 1) / threads, shares = (rows + share - 1) / share;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long task = 0; task < groups * shares; ++task) {
        const long e = task / shares, i = task % shares * share, begin = e ? ends[e - 1] : 0;
        const long task_rows = std::min(share, rows - i);
        float* task_out = out + (e * rows + i) * columns;
        // A group without rows has a depth of 0, at which `multiply` writes nothing.
        if (ends[e] == begin) std::fill_n(task_out, task_rows * columns, 0.0f);
        // The left operand's strides are swapped, which transposes it.
        multiply(task_rows, ends[e] - begin, columns,
                 {left + begin * left_row + i * left_column, left_column, left_row},
                 {right + begin * right_row, right_row, right_column}, task_out);
    }
}
