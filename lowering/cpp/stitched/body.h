// What a compiled body exports, in the place of torch's interface of a whole model (interface.cpp), whose container, constants and
// regular expressions take most of the seconds that a small body compiles. aoti.py puts this text into the generated code.
#include <torch/csrc/inductor/aoti_runtime/interface.h>
#include <torch/csrc/inductor/aoti_runtime/model.h>

namespace torch::aot_inductor {

// Torch's own constructor reads the device from a text with std::regex.
template <>
inline AOTInductorModelBase<AOTInductorModel>::AOTInductorModelBase(
    size_t num_inputs, size_t num_outputs, size_t num_constants, const std::string&, std::optional<std::string> cubin_dir,
    bool include_weights)
    : inputs_info_(num_inputs), outputs_info_(num_outputs), constants_info_(num_constants), cubin_dir_(std::move(cubin_dir)),
      include_weights(include_weights) {
    device_type_ = aoti_torch_device_type_cpu();
    device_idx_ = -1;
}

}  // namespace torch::aot_inductor

namespace {

thread_local std::string npuc_error;

template <typename Body>
int npuc_guarded(Body body) {
    try {
        return body(), 0;
    } catch (const std::exception& error) {
        npuc_error = error.what();
    } catch (...) {
        npuc_error = "unknown error";
    }
    return 1;
}

}  // namespace

extern "C" {

// All but `npuc_body_error` return 0, or 1 where it has a message.
AOTI_API int npuc_body_create(void** body, size_t* inputs, size_t* outputs) {
    return npuc_guarded([&] {
        using namespace torch::aot_inductor;
        auto constants = std::make_shared<std::vector<ConstantHandle>>();
        auto model = std::make_unique<AOTInductorModel>(std::make_shared<ConstantMap>(), constants, "cpu", std::nullopt);
        if (model->num_constants()) model->load_constants();
        *inputs = model->num_inputs(), *outputs = model->num_outputs();
        *body = model.release();
    });
}

AOTI_API int npuc_body_run(void* body, AtenTensorHandle* inputs, AtenTensorHandle* outputs) {
    return npuc_guarded([&] { static_cast<torch::aot_inductor::AOTInductorModel*>(body)->run_impl(inputs, outputs, nullptr, nullptr); });
}

AOTI_API int npuc_body_delete(void* body) {
    return npuc_guarded([&] { delete static_cast<torch::aot_inductor::AOTInductorModel*>(body); });
}

AOTI_API const char* npuc_body_error() { return npuc_error.c_str(); }

}  // extern "C"
