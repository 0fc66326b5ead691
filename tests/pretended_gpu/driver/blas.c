// cuBLAS and cuBLASLt: matrix products, which are written down as launches with their shape in the name.
#include <stdint.h>
// The wheels lack what these two headers include, and cuBLAS's own headers want only the names of their types.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
typedef uint16_t __half;
typedef uint16_t __nv_bfloat16;

#pragma GCC visibility push(default)
#include <cublasLt.h>
#include <cublas_api.h>
#pragma GCC visibility pop

#include "card.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LT_VERSION 130100

struct cublasContext {
    cudaStream_t stream;
    cublasMath_t math;
    cublasPointerMode_t pointers;
};

typedef struct {
    cudaDataType type;
    uint64_t rows;
    uint64_t columns;
} Layout;

// ---- handles

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = calloc(1, sizeof **handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    handle->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    *mode = handle->math;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
    handle->pointers = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
    *mode = handle->pointers;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetSmCountTarget(cublasHandle_t handle, int multiprocessors) {
    return CUBLAS_STATUS_SUCCESS;
}

// ---- products

// Refuses operands that the card cannot use. An empty tensor has none.
static cudaError_t operands_in_reach(const char *name, const void *a, const void *b, const void *c) {
    const void *operands[] = {a, b, c};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 3 && !error; ++i)
        if (operands[i])
            error = within_reach(current_card(), operands[i], name);
    return error;
}

static cublasStatus_t product(const char *name, cudaStream_t stream, const void *a, const void *b, const void *c) {
    Launch launch = {.library = "blas", .name = name, .grid = {1, 1, 1}, .block = {1, 1, 1}};
    cudaError_t error = operands_in_reach(name, a, b, c);
    if (!error)
        error = launch_kernel(&launch, stream, false);
    if (failed(error))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    LOCKED;
    current_card()->counts.products++;
    return CUBLAS_STATUS_SUCCESS;
}

typedef struct {
    cublasOperation_t left;
    cublasOperation_t right;
    int m;
    int n;
    int k;
    int batch;
} Shape;

static cublasStatus_t gemm(
    const char *call, cublasHandle_t handle, Shape is, const void *a, const void *b, const void *c
) {
    char name[160];
    char left = is.left == CUBLAS_OP_N ? 'N' : 'T';
    char right = is.right == CUBLAS_OP_N ? 'N' : 'T';
    snprintf(name, sizeof name, "%s_%c%c_m%d_n%d_k%d_b%d", call, left, right, is.m, is.n, is.k, is.batch);
    return product(name, handle->stream, a, b, c);
}

cublasStatus_t cublasGemmEx(
    cublasHandle_t handle, cublasOperation_t left, cublasOperation_t right, int m, int n, int k, const void *alpha,
    const void *a, cudaDataType a_type, int a_stride, const void *b, cudaDataType b_type, int b_stride,
    const void *beta, void *c, cudaDataType c_type, int c_stride, cublasComputeType_t compute, cublasGemmAlgo_t chosen
) {
    return gemm("GemmEx", handle, (Shape){left, right, m, n, k, 1}, a, b, c);
}

cublasStatus_t cublasSgemmEx(
    cublasHandle_t handle, cublasOperation_t left, cublasOperation_t right, int m, int n, int k, const float *alpha,
    const void *a, cudaDataType a_type, int a_stride, const void *b, cudaDataType b_type, int b_stride,
    const float *beta, void *c, cudaDataType c_type, int c_stride
) {
    return gemm("SgemmEx", handle, (Shape){left, right, m, n, k, 1}, a, b, c);
}

cublasStatus_t cublasSgemm_v2(
    cublasHandle_t handle, cublasOperation_t left, cublasOperation_t right, int m, int n, int k, const float *alpha,
    const float *a, int a_stride, const float *b, int b_stride, const float *beta, float *c, int c_stride
) {
    return gemm("Sgemm", handle, (Shape){left, right, m, n, k, 1}, a, b, c);
}

cublasStatus_t cublasDgemm_v2(
    cublasHandle_t handle, cublasOperation_t left, cublasOperation_t right, int m, int n, int k, const double *alpha,
    const double *a, int a_stride, const double *b, int b_stride, const double *beta, double *c, int c_stride
) {
    return gemm("Dgemm", handle, (Shape){left, right, m, n, k, 1}, a, b, c);
}

cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t left, cublasOperation_t right, int m, int n, int k, const void *alpha,
    const void *a, cudaDataType a_type, int a_stride, long long a_batch, const void *b, cudaDataType b_type,
    int b_stride, long long b_batch, const void *beta, void *c, cudaDataType c_type, int c_stride, long long c_batch,
    int batch, cublasComputeType_t compute, cublasGemmAlgo_t chosen
) {
    return gemm("GemmStridedBatchedEx", handle, (Shape){left, right, m, n, k, batch}, a, b, c);
}

cublasStatus_t cublasSgemmStridedBatched(
    cublasHandle_t handle, cublasOperation_t left, cublasOperation_t right, int m, int n, int k, const float *alpha,
    const float *a, int a_stride, long long a_batch, const float *b, int b_stride, long long b_batch,
    const float *beta, float *c, int c_stride, long long c_batch, int batch
) {
    return gemm("SgemmStridedBatched", handle, (Shape){left, right, m, n, k, batch}, a, b, c);
}

cublasStatus_t cublasDgemmStridedBatched(
    cublasHandle_t handle, cublasOperation_t left, cublasOperation_t right, int m, int n, int k, const double *alpha,
    const double *a, int a_stride, long long a_batch, const double *b, int b_stride, long long b_batch,
    const double *beta, double *c, int c_stride, long long c_batch, int batch
) {
    return gemm("DgemmStridedBatched", handle, (Shape){left, right, m, n, k, batch}, a, b, c);
}

cublasStatus_t cublasSgemv_v2(
    cublasHandle_t handle, cublasOperation_t left, int m, int n, const float *alpha, const float *a, int a_stride,
    const float *x, int x_step, const float *beta, float *y, int y_step
) {
    return gemm("Sgemv", handle, (Shape){left, CUBLAS_OP_N, m, n, 1, 1}, a, x, y);
}

cublasStatus_t cublasDgemv_v2(
    cublasHandle_t handle, cublasOperation_t left, int m, int n, const double *alpha, const double *a, int a_stride,
    const double *x, int x_step, const double *beta, double *y, int y_step
) {
    return gemm("Dgemv", handle, (Shape){left, CUBLAS_OP_N, m, n, 1, 1}, a, x, y);
}

// Its result may be on the host, so it is no operand to look at.
static cublasStatus_t dot(const char *call, cublasHandle_t handle, int n, const void *x, const void *y) {
    return gemm(call, handle, (Shape){CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, n, 1}, x, y, NULL);
}

cublasStatus_t cublasSdot_v2(
    cublasHandle_t handle, int n, const float *x, int x_step, const float *y, int y_step, float *result
) {
    return dot("Sdot", handle, n, x, y);
}

cublasStatus_t cublasDdot_v2(
    cublasHandle_t handle, int n, const double *x, int x_step, const double *y, int y_step, double *result
) {
    return dot("Ddot", handle, n, x, y);
}

cublasStatus_t cublasDotEx(
    cublasHandle_t handle, int n, const void *x, cudaDataType x_type, int x_step, const void *y, cudaDataType y_type,
    int y_step, void *result, cudaDataType result_type, cudaDataType compute
) {
    return dot("DotEx", handle, n, x, y);
}

// ---- cuBLASLt

size_t cublasLtGetVersion(void) {
    return LT_VERSION;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    return cublasCreate_v2((cublasHandle_t *)handle);
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    return cublasDestroy_v2((cublasHandle_t)handle);
}

cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t *made, cublasComputeType_t compute, cudaDataType_t scale_type
) {
    *made = calloc(1, sizeof **made);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
    free(description);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes
) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) {
    *made = calloc(1, sizeof **made);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
    size_t bytes
) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t *made, cudaDataType type, uint64_t rows, uint64_t columns, int64_t stride
) {
    Layout *layout = calloc(1, sizeof *layout);
    *layout = (Layout){type, rows, columns};
    *made = (cublasLtMatrixLayout_t)layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    free(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(
    cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t bytes
) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t description, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int asked,
    cublasLtMatmulHeuristicResult_t results[], int *found
) {
    memset(results, 0, sizeof *results);
    results->state = CUBLAS_STATUS_SUCCESS;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t description, const void *alpha, const void *a,
    cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
    cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *chosen,
    void *workspace, size_t workspace_bytes, cudaStream_t stream
) {
    const Layout *left = (const Layout *)a_layout;
    const Layout *right = (const Layout *)b_layout;
    const Layout *out = (const Layout *)d_layout;
    char name[160];
    snprintf(
        name, sizeof name, "LtMatmul_a%lux%lu_b%lux%lu_types%d,%d->%d", left->rows, left->columns, right->rows,
        right->columns, left->type, right->type, out->type
    );
    return product(name, stream, a, b, d);
}
