// The functions that a package calls: they turn torch's tensor handles into the kernels' pointers and sizes. Linked into each package.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdio>
#include <vector>

#include "kernels.h"

namespace {

struct Failed {};

void check(AOTITorchError error) {
    if (error != AOTI_TORCH_SUCCESS) throw Failed{};
}

// The tensor of a handle, which it does not own.
struct Tensor {
    void* data;
    const int64_t *sizes, *strides;
    int64_t dim;
    int32_t dtype;

    explicit Tensor(AtenTensorHandle handle) {
        int64_t *found_sizes, *found_strides;
        check(aoti_torch_get_data_ptr(handle, &data));
        check(aoti_torch_get_dim(handle, &dim));
        check(aoti_torch_get_sizes(handle, &found_sizes));
        check(aoti_torch_get_strides(handle, &found_strides));
        check(aoti_torch_get_dtype(handle, &dtype));
        sizes = found_sizes, strides = found_strides;
    }

    // Whether dimensions `from` and later are contiguous.
    bool dense(int64_t from = 0) const {
        int64_t step = 1;
        for (int64_t d = dim - 1; d >= from; step *= sizes[d--])
            if (sizes[d] != 1 && strides[d] != step) return false;
        return true;
    }
};

// A tensor's elements without gaps, copied if need be.
template <typename T>
struct Dense {
    std::vector<T> copy;
    const T* data;

    explicit Dense(const Tensor& from) : data(static_cast<const T*>(from.data)) {
        if (from.dense()) return;
        const int64_t wide = from.sizes[from.dim - 1], step = from.strides[from.dim - 1];
        int64_t rows = 1;
        for (int64_t d = 0; d < from.dim - 1; d++) rows *= from.sizes[d];
        copy.resize(rows * wide);
        for (int64_t row = 0; row < rows; row++) {
            int64_t at = 0, left = row;
            for (int64_t d = from.dim - 2; d >= 0; d--) at += left % from.sizes[d] * from.strides[d], left /= from.sizes[d];
            for (int64_t i = 0; i < wide; i++) copy[row * wide + i] = data[at + i * step];
        }
        data = copy.data();
    }
};

// Slots, lengths and the like.
struct Numbers : Dense<int32_t> {
    explicit Numbers(AtenTensorHandle of) : Numbers(Tensor(of)) {}
    explicit Numbers(const Tensor& of) : Dense(of) {
        if (of.dtype != aoti_torch_dtype_int32()) throw Failed{};
    }
};

// Rows [T, K] of elements that are `ld` elements apart, copied if a row has gaps.
template <typename T>
struct Rows {
    std::vector<T> copy;
    const T* data;
    int64_t ld;

    explicit Rows(const Tensor& from) : data(static_cast<const T*>(from.data)), ld(from.sizes[0] == 1 ? from.sizes[1] : from.strides[0]) {
        if (from.dense(1)) return;
        Dense<T> dense(from);
        copy.swap(dense.copy);
        data = copy.data(), ld = from.sizes[1];
    }
};

// Calls `use(data, whether they are bfloat16, distance)` with rows of bfloat16 or float32.
template <typename Use>
void with_rows(const Tensor& from, const Use& use) {
    if (from.dtype == aoti_torch_dtype_float32()) {
        const Rows<float> rows(from);
        use(rows.data, 0, rows.ld);
    } else {
        if (from.dtype != aoti_torch_dtype_bfloat16()) throw Failed{};
        const Rows<uint16_t> rows(from);
        use(rows.data, 1, rows.ld);
    }
}

void* make(int64_t dim, const int64_t* sizes, int32_t dtype, AtenTensorHandle* made) {
    std::vector<int64_t> strides(dim, 1);
    for (int64_t d = dim - 2; d >= 0; d--) strides[d] = strides[d + 1] * sizes[d + 1];
    check(aoti_torch_empty_strided(dim, sizes, strides.data(), dtype, aoti_torch_device_type_cpu(), 0, made));
    void* data;
    check(aoti_torch_get_data_ptr(*made, &data));
    return data;
}

template <typename Kernel>
AOTITorchError guarded(const char* name, const Kernel& kernel) {
    try {
        kernel();
        return AOTI_TORCH_SUCCESS;
    } catch (...) {
        std::fprintf(stderr, "npuc_native.%s failed: out of memory, or a tensor torch would not describe\n", name);
        return AOTI_TORCH_FAILURE;
    }
}

// Checks a layout that the graph guarantees; a failure is an error of the compiler, never of a request.
void promised(bool kept) {
    if (!kept) throw Failed{};
}

// A product of rows of T with weights of the same dtype, which are in panels.
template <typename T, typename Kernel>
void linear(Kernel kernel, int32_t dtype, AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* out) {
    const Tensor input(x), w(weight);
    promised(w.dense() && input.dtype == dtype && w.dtype == dtype);
    const Rows<T> rows(input);
    const int64_t sizes[] = {input.sizes[0], w.sizes[0]};
    void* y = make(2, sizes, dtype, out);
    kernel(rows.data, rows.ld, w.data, sizes[0], sizes[1], w.sizes[1], y);
}

// Rows of a table that is in panels.
template <typename Kernel>
void embed(Kernel kernel, int32_t dtype, AtenTensorHandle tokens, AtenTensorHandle table, AtenTensorHandle* out) {
    const Tensor ids(tokens), rows(table);
    const bool wide = ids.dtype == aoti_torch_dtype_int64();
    promised(rows.dense() && ids.dense() && rows.dtype == dtype && (wide || ids.dtype == aoti_torch_dtype_int32()));
    const int64_t sizes[] = {ids.sizes[0], rows.sizes[1]};
    void* y = make(2, sizes, dtype, out);
    kernel(ids.data, wide, rows.data, sizes[0], sizes[1], y);
}

}  // namespace

extern "C" {

AOTITorchError aoti_torch_cpu_npuc_linear_f32(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* out) {
    return guarded("npuc_linear_f32", [&] { linear<float>(npuc_linear_f32, aoti_torch_dtype_float32(), x, weight, out); });
}

AOTITorchError aoti_torch_cpu_npuc_linear_bf16(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* out) {
    return guarded("npuc_linear_bf16", [&] { linear<uint16_t>(npuc_linear_bf16, aoti_torch_dtype_bfloat16(), x, weight, out); });
}

AOTITorchError aoti_torch_cpu_npuc_embed_f32(AtenTensorHandle tokens, AtenTensorHandle table, AtenTensorHandle* out) {
    return guarded("npuc_embed_f32", [&] { embed(npuc_embed_f32, aoti_torch_dtype_float32(), tokens, table, out); });
}

AOTITorchError aoti_torch_cpu_npuc_embed_bf16(AtenTensorHandle tokens, AtenTensorHandle table, AtenTensorHandle* out) {
    return guarded("npuc_embed_bf16", [&] { embed(npuc_embed_bf16, aoti_torch_dtype_bfloat16(), tokens, table, out); });
}

AOTITorchError aoti_torch_cpu_npuc_quant_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle* out) {
    return guarded("npuc_quant_linear", [&] {
        const Tensor input(x), w(weight), scales(scale);
        promised(w.dense() && w.dtype == aoti_torch_dtype_int8() && scales.dtype == aoti_torch_dtype_float32());
        const Dense<float> each(scales);
        with_rows(input, [&](const void* rows, int64_t half, int64_t ld) {
            const int64_t sizes[] = {input.sizes[0], w.sizes[1]};
            void* y = make(2, sizes, input.dtype, out);
            npuc_quant_linear(rows, half, ld, w.data, each.data, sizes[0], sizes[1], w.sizes[0], y);
        });
    });
}

AOTITorchError aoti_torch_cpu_npuc_static_quant_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale,
                                                       AtenTensorHandle bias, AtenTensorHandle input_scale, AtenTensorHandle input_offset,
                                                       AtenTensorHandle* out) {
    return guarded("npuc_static_quant_linear", [&] {
        const Tensor input(x), w(weight), scales(scale), more(bias), by(input_scale), offset(input_offset);
        promised(w.dense() && w.dtype == aoti_torch_dtype_int8() && more.dtype == aoti_torch_dtype_int32());
        for (const Tensor* one : {&scales, &by, &offset}) promised(one->dtype == aoti_torch_dtype_float32());
        const Dense<float> each(scales);
        const Dense<int32_t> added(more);
        with_rows(input, [&](const void* rows, int64_t half, int64_t ld) {
            const int64_t sizes[] = {input.sizes[0], w.sizes[1]};
            void* y = make(2, sizes, input.dtype, out);
            npuc_static_quant_linear(rows, half, ld, w.data, each.data, added.data, *static_cast<const float*>(by.data),
                                     *static_cast<const float*>(offset.data), sizes[0], sizes[1], w.sizes[0], y);
        });
    });
}

AOTITorchError aoti_torch_cpu_npuc_linear_int4(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle* out) {
    return guarded("npuc_linear_int4", [&] {
        const Tensor input(x), w(weight), scales(scale);
        promised(w.dense() && w.dtype == aoti_torch_dtype_int32() && scales.dtype == aoti_torch_dtype_float32());
        const Dense<float> each(scales);
        with_rows(input, [&](const void* rows, int64_t half, int64_t ld) {
            const int64_t sizes[] = {input.sizes[0], scales.sizes[1]};
            void* y = make(2, sizes, input.dtype, out);
            npuc_linear_int4(rows, half, ld, w.data, each.data, scales.sizes[0], sizes[0], sizes[1], w.sizes[0], y);
        });
    });
}

AOTITorchError aoti_torch_cpu_npuc_experts(AtenTensorHandle x, AtenTensorHandle weights, AtenTensorHandle ids, AtenTensorHandle gate_up,
                                           AtenTensorHandle down, AtenTensorHandle* out) {
    return guarded("npuc_experts", [&] {
        const Tensor input(x), share(weights), chosen(ids), wide(gate_up), narrow(down);
        promised(wide.dense() && narrow.dense() && chosen.dtype == aoti_torch_dtype_int32());
        for (const Tensor* one : {&input, &share, &wide, &narrow}) promised(one->dtype == aoti_torch_dtype_float32());
        const Rows<float> rows(input);
        const Dense<float> shares(share);
        const Dense<int32_t> choices(chosen);
        auto* y = static_cast<float*>(make(2, input.sizes, input.dtype, out));
        npuc_experts(rows.data, rows.ld, shares.data, choices.data, static_cast<const float*>(wide.data),
                     static_cast<const float*>(narrow.data), input.sizes[0], chosen.sizes[1], wide.sizes[0], wide.sizes[2], wide.sizes[3], y);
    });
}

AOTITorchError aoti_torch_cpu_npuc_experts_bf16(AtenTensorHandle x, AtenTensorHandle weights, AtenTensorHandle ids, AtenTensorHandle gate_up,
                                                AtenTensorHandle down, AtenTensorHandle* out) {
    return guarded("npuc_experts_bf16", [&] {
        const Tensor input(x), share(weights), chosen(ids), wide(gate_up), narrow(down);
        promised(wide.dense() && narrow.dense() && chosen.dtype == aoti_torch_dtype_int32() && share.dtype == aoti_torch_dtype_float32());
        for (const Tensor* one : {&input, &wide, &narrow}) promised(one->dtype == aoti_torch_dtype_bfloat16());
        const Rows<uint16_t> rows(input);
        const Dense<float> shares(share);
        const Dense<int32_t> choices(chosen);
        void* y = make(2, input.sizes, input.dtype, out);
        npuc_experts_bf16(rows.data, rows.ld, shares.data, choices.data, wide.data, narrow.data, input.sizes[0], chosen.sizes[1],
                          wide.sizes[0], wide.sizes[2], wide.sizes[3], y);
    });
}

AOTITorchError aoti_torch_cpu_npuc_grouped_int4(AtenTensorHandle rows, AtenTensorHandle counts, AtenTensorHandle gate_up,
                                                AtenTensorHandle gate_up_scale, AtenTensorHandle down, AtenTensorHandle down_scale,
                                                AtenTensorHandle* out) {
    return guarded("npuc_grouped_int4", [&] {
        const Tensor input(rows), each(counts), wide(gate_up), wide_scale(gate_up_scale), narrow(down), narrow_scale(down_scale);
        promised(wide.dense() && narrow.dense() && each.dtype == aoti_torch_dtype_int64());
        for (const Tensor* one : {&wide, &narrow}) promised(one->dtype == aoti_torch_dtype_int32());
        for (const Tensor* one : {&wide_scale, &narrow_scale}) promised(one->dtype == aoti_torch_dtype_float32());
        const Dense<int64_t> taken(each);
        const Dense<float> up(wide_scale), back(narrow_scale);
        const int64_t sizes[] = {input.sizes[0], wide.sizes[0], narrow.sizes[1], input.sizes[1], wide_scale.sizes[1], narrow_scale.sizes[1]};
        with_rows(input, [&](const void* x, int64_t half, int64_t ld) {
            void* y = make(2, input.sizes, input.dtype, out);
            npuc_grouped_int4(x, half, ld, taken.data, wide.data, up.data, narrow.data, back.data, sizes, y);
        });
    });
}

AOTITorchError aoti_torch_cpu_npuc_grouped_int8(AtenTensorHandle rows, AtenTensorHandle row_scale, AtenTensorHandle counts,
                                                AtenTensorHandle gate_up, AtenTensorHandle gate_up_scale, AtenTensorHandle down,
                                                AtenTensorHandle down_scale, int64_t half, AtenTensorHandle* out) {
    return guarded("npuc_grouped_int8", [&] {
        const Tensor input(rows), row_scales(row_scale), each(counts), wide(gate_up), wide_scale(gate_up_scale), narrow(down);
        const Tensor narrow_scale(down_scale);
        promised(wide.dense() && narrow.dense() && each.dtype == aoti_torch_dtype_int64());
        for (const Tensor* one : {&input, &wide, &narrow}) promised(one->dtype == aoti_torch_dtype_int8());
        for (const Tensor* one : {&row_scales, &wide_scale, &narrow_scale}) promised(one->dtype == aoti_torch_dtype_float32());
        const Dense<int8_t> x(input);
        const Dense<int64_t> taken(each);
        const Dense<float> by(row_scales), up(wide_scale), back(narrow_scale);
        const int64_t sizes[] = {input.sizes[0], wide.sizes[0], narrow.sizes[1], input.sizes[1]};
        void* y = make(2, input.sizes, half ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32(), out);
        npuc_grouped_int8(x.data, by.data, taken.data, wide.data, up.data, narrow.data, back.data, sizes, half, y);
    });
}

AOTITorchError aoti_torch_cpu_npuc_attention(AtenTensorHandle q, AtenTensorHandle k_cache, AtenTensorHandle v_cache,
                                             AtenTensorHandle page_table, AtenTensorHandle starts, AtenTensorHandle lengths, double scale,
                                             AtenTensorHandle* out) {
    return guarded("npuc_attention", [&] {
        const Tensor query(q), keys(k_cache), values(v_cache), table(page_table), first(starts), live(lengths);
        promised(keys.dense() && values.dense() && keys.dtype == query.dtype && values.dtype == query.dtype);
        for (const Tensor* one : {&table, &first, &live}) promised(one->dtype == aoti_torch_dtype_int32());
        const int64_t sizes[] = {query.sizes[0], query.sizes[1], query.sizes[2], keys.sizes[2], query.sizes[3], keys.sizes[1], table.sizes[1]};
        const Dense<int32_t> pages(table), begin(first), count(live);
        void* to = make(4, query.sizes, query.dtype, out);
        if (query.dtype == aoti_torch_dtype_float32()) {
            const Dense<float> rows(query);
            npuc_attention(rows.data, static_cast<const float*>(keys.data), static_cast<const float*>(values.data), pages.data, begin.data,
                           count.data, float(scale), sizes, static_cast<float*>(to));
        } else {
            promised(query.dtype == aoti_torch_dtype_bfloat16());
            const Dense<uint16_t> rows(query);
            npuc_attention_bf16(rows.data, keys.data, values.data, pages.data, begin.data, count.data, float(scale), sizes, to);
        }
    });
}

AOTITorchError aoti_torch_cpu_npuc_conv(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle state, AtenTensorHandle read,
                                        AtenTensorHandle write, AtenTensorHandle starts, AtenTensorHandle* out) {
    return guarded("npuc_conv", [&] {
        const Tensor input(x), w(weight), pool(state), first(read), slots(write), begins(starts);
        for (const Tensor* one : {&w, &pool}) promised(one->dtype == input.dtype);
        for (const Tensor* one : {&first, &slots, &begins}) promised(one->dtype == aoti_torch_dtype_int32());
        promised(pool.dense());
        const Dense<int32_t> from(first), to(slots), begin(begins);
        const int64_t *sizes = input.sizes, B = sizes[0], Q = sizes[1], C = sizes[2], taps = w.sizes[1];
        void* y = make(3, sizes, input.dtype, out);
        if (input.dtype == aoti_torch_dtype_float32()) {
            const Dense<float> x_(input), w_(w);
            npuc_conv(x_.data, w_.data, static_cast<float*>(pool.data), from.data, to.data, begin.data, B, Q, C, taps, static_cast<float*>(y));
        } else {
            promised(input.dtype == aoti_torch_dtype_bfloat16());
            const Dense<uint16_t> x_(input), w_(w);
            npuc_conv_bf16(x_.data, w_.data, pool.data, from.data, to.data, begin.data, B, Q, C, taps, y);
        }
    });
}

AOTITorchError aoti_torch_cpu_npuc_delta(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle g,
                                         AtenTensorHandle beta, AtenTensorHandle state, AtenTensorHandle read, AtenTensorHandle write,
                                         AtenTensorHandle starts, AtenTensorHandle* out) {
    return guarded("npuc_delta", [&] {
        const Tensor queries(q), keys(k), values(v), gates(g), betas(beta), pool(state), first(read), slots(write), begins(starts);
        for (const Tensor* one : {&gates, &betas, &pool}) promised(one->dtype == aoti_torch_dtype_float32());
        promised(queries.dtype == values.dtype && keys.dtype == values.dtype);
        for (const Tensor* one : {&first, &slots, &begins}) promised(one->dtype == aoti_torch_dtype_int32());
        promised(pool.dense());
        const Dense<float> g_(gates), b_(betas);
        const Dense<int32_t> from(first), to(slots), begin(begins);
        const int64_t sizes[] = {values.sizes[0], values.sizes[1], keys.sizes[2], values.sizes[2], keys.sizes[3], values.sizes[3]};
        void* y = make(4, values.sizes, values.dtype, out);
        auto* states = static_cast<float*>(pool.data);
        if (values.dtype == aoti_torch_dtype_float32()) {
            const Dense<float> q_(queries), k_(keys), v_(values);
            npuc_delta(q_.data, k_.data, v_.data, g_.data, b_.data, states, from.data, to.data, begin.data, sizes, static_cast<float*>(y));
        } else {
            promised(values.dtype == aoti_torch_dtype_bfloat16());
            const Dense<uint16_t> q_(queries), k_(keys), v_(values);
            npuc_delta_bf16(q_.data, k_.data, v_.data, g_.data, b_.data, states, from.data, to.data, begin.data, sizes, y);
        }
    });
}

AOTITorchError aoti_torch_cpu_npuc_conv_rows(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle state, AtenTensorHandle read,
                                             AtenTensorHandle write, AtenTensorHandle starts, AtenTensorHandle lengths,
                                             AtenTensorHandle* out) {
    return guarded("npuc_conv_rows", [&] {
        const Tensor input(x), w(weight), pool(state);
        const Numbers from(read), to(write), begin(starts), count(lengths);
        for (const Tensor* one : {&w, &pool}) promised(one->dtype == input.dtype);
        const int64_t *sizes = input.sizes, B = sizes[0], Q = sizes[1], C = sizes[2], taps = w.sizes[1];
        promised(pool.dense() && pool.sizes[1] == taps - 1);
        auto* y = static_cast<float*>(make(3, sizes, aoti_torch_dtype_float32(), out));
        if (input.dtype == aoti_torch_dtype_float32()) {
            const Dense<float> x_(input), w_(w);
            npuc_conv_rows(x_.data, w_.data, static_cast<float*>(pool.data), from.data, to.data, begin.data, count.data, B, Q, C, taps, y);
        } else {
            promised(input.dtype == aoti_torch_dtype_bfloat16());
            const Dense<uint16_t> x_(input), w_(w);
            npuc_conv_rows_bf16(x_.data, w_.data, pool.data, from.data, to.data, begin.data, count.data, B, Q, C, taps, y);
        }
    });
}

AOTITorchError aoti_torch_cpu_npuc_delta_rows(AtenTensorHandle qkv, AtenTensorHandle decay, AtenTensorHandle beta, AtenTensorHandle state,
                                              AtenTensorHandle read, AtenTensorHandle write, AtenTensorHandle starts,
                                              AtenTensorHandle lengths, double eps, int64_t half, AtenTensorHandle* out) {
    return guarded("npuc_delta_rows", [&] {
        const Tensor tokens(qkv), gates(decay), betas(beta), pool(state);
        for (const Tensor* one : {&tokens, &gates, &betas, &pool}) promised(one->dtype == aoti_torch_dtype_float32());
        promised(pool.dense());
        const Numbers from(read), to(write), begin(starts), count(lengths);
        const Dense<float> x(tokens), g_(gates), b_(betas);
        const int64_t *shape = pool.sizes, sizes[] = {tokens.sizes[0], tokens.sizes[1], tokens.sizes[2], shape[1], shape[3], shape[2]};
        const int64_t made[] = {sizes[0], sizes[1], sizes[3], sizes[5]};
        void* y = make(4, made, half ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32(), out);
        auto* states = static_cast<float*>(pool.data);
        const auto call = [&](auto kernel, auto* result) {
            kernel(x.data, g_.data, b_.data, states, from.data, to.data, begin.data, count.data, float(eps), sizes, result);
        };
        half ? call(npuc_delta_rows_bf16, y) : call(npuc_delta_rows, static_cast<float*>(y));
    });
}

AOTITorchError aoti_torch_cpu_npuc_sample(AtenTensorHandle logits, AtenTensorHandle temperature, AtenTensorHandle top_k,
                                          AtenTensorHandle top_p, AtenTensorHandle min_p, AtenTensorHandle uniform, AtenTensorHandle* out) {
    return guarded("npuc_sample", [&] {
        const Tensor scores(logits), heat(temperature), k(top_k), p(top_p), least(min_p), draws(uniform);
        promised(k.dtype == aoti_torch_dtype_int32());
        for (const Tensor* one : {&scores, &heat, &p, &least, &draws}) promised(one->dtype == aoti_torch_dtype_float32());
        const Dense<float> x(scores), t(heat), leading(p), floor(least), u(draws);
        const Dense<int32_t> most(k);
        auto* to = static_cast<int32_t*>(make(2, draws.sizes, k.dtype, out));
        npuc_sample(x.data, t.data, most.data, leading.data, floor.data, u.data, scores.sizes[0], scores.sizes[1], scores.sizes[2], to);
    });
}

AOTITorchError aoti_torch_cpu_npuc_logprobs(AtenTensorHandle logits, AtenTensorHandle tokens, AtenTensorHandle asked, int64_t most,
                                            AtenTensorHandle* chosen, AtenTensorHandle* ids, AtenTensorHandle* values) {
    return guarded("npuc_logprobs", [&] {
        const Tensor scores(logits), taken(tokens), wanted(asked);
        promised(scores.dtype == aoti_torch_dtype_float32());
        for (const Tensor* one : {&taken, &wanted}) promised(one->dtype == aoti_torch_dtype_int32());
        const Dense<float> x(scores);
        const Dense<int32_t> token(taken), want(wanted);
        const int64_t sizes[] = {scores.sizes[0], scores.sizes[1], most};
        auto* one = static_cast<float*>(make(2, sizes, scores.dtype, chosen));
        auto* which = static_cast<int32_t*>(make(3, sizes, taken.dtype, ids));
        auto* all = static_cast<float*>(make(3, sizes, scores.dtype, values));
        npuc_logprobs(x.data, token.data, want.data, sizes[0], sizes[1], scores.sizes[2], most, one, which, all);
    });
}
}
