// Native exceptions become the classes of aiokv.errors.
#include "aiokv/error.hpp"
#include "bindings.hpp"

namespace nb = nanobind;

namespace aiokv {
namespace {

void raise(const char* name, const Error& error) {
    nb::object type = nb::module_::import_("aiokv.errors").attr(name);
    PyErr_SetString(type.ptr(), error.what());
}

void raise_device_error(const DeviceError& error) {
    nb::object type = nb::module_::import_("aiokv.errors").attr("DeviceError");
    nb::object value = type(error.what(), nb::arg("cuda_code") = error.code);
    PyErr_SetObject(type.ptr(), value.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const ConfigError& e) {
        raise("ConfigError", e);
    } catch (const LayoutError& e) {
        raise("LayoutError", e);
    } catch (const LeaseError& e) {
        raise("LeaseError", e);
    } catch (const UsageError& e) {
        raise("UsageError", e);
    } catch (const RequestTooLarge& e) {
        raise("RequestTooLarge", e);
    } catch (const DeviceError& e) {
        raise_device_error(e);
    } catch (const InternalError& e) {
        raise("InternalError", e);
    }
}

}  // namespace

void bind_errors(nb::module_&) {
    nb::register_exception_translator(translate);
}

}  // namespace aiokv
