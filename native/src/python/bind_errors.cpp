// Native exceptions become the classes of aiokv.errors.
#include <nanobind/stl/string.h>

#include "aiokv/error.hpp"
#include "bindings.hpp"

namespace nb = nanobind;

namespace aiokv {
namespace {

void set_error(const nb::object& value, const Error& error) {
    const ErrorDetails& details = error.details;
    if (!details.config_field.empty()) value.attr("config_field") = details.config_field;
    if (details.lease != 0) value.attr("lease_id") = details.lease;
    PyErr_SetObject(value.type().ptr(), value.ptr());
}

nb::object class_of(const char* name) {
    return nb::module_::import_("aiokv.errors").attr(name);
}

void raise(const char* name, const Error& error) {
    set_error(class_of(name)(error.what(), nb::arg("hint") = error.details.hint), error);
}

void raise_device_error(const DeviceError& error) {
    set_error(class_of("DeviceError")(error.what(), nb::arg("cuda_code") = error.code,
                                      nb::arg("hint") = error.details.hint),
              error);
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
