// Compiled sample order and blend order of Megatron-style data sets, and NumPy's shuffle.
//
// The same results as index_map.py, blend.py and sentence_map.py in megatron/data/order/ and NumPy, byte for byte, with less memory and
// time. Large tables are bound by memory latency, so entries are prefetched.
// Every index is checked; an invalid one raises a ValueError with its position. Nothing here can abort the process.
//
// Source: the algorithms of bigscience Megatron-DeepSpeed, megatron/data/helpers.cpp; NumPy, `RandomState.shuffle` and
// `random_interval` (numpy/random/src/distributions/distributions.c).

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "sentence_map.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

// Raised in Python as ValueError.
[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

// Prefetches memory that will be read soon.
inline void prefetch(const void* place) {
#if defined(__GNUC__) || defined(__clang__)
    __builtin_prefetch(place);
#else
    (void)place;
#endif
}

// Prefetch distance of lengths, in documents.
constexpr std::int64_t kDocumentsAhead = 32;

template <typename Id, typename Entry>
void fill_sample_index(const std::int32_t* lengths, std::int64_t sequences, const Id* documents, std::int64_t entries,
                       std::int64_t sequence_length, std::int64_t samples, Entry* rows) {
    std::int64_t asked = 0;   // number of documents whose lengths were prefetched
    std::int64_t place = 0;   // position in `documents`
    std::int64_t offset = 0;  // token inside that document
    rows[0] = 0;
    rows[1] = 0;
    for (std::int64_t sample = 1; sample <= samples; ++sample) {
        std::int64_t remaining = sequence_length + 1;
        while (true) {
            if (place >= entries) {
                refuse("the documents end inside sample " + std::to_string(sample - 1) + " of " + std::to_string(samples) +
                       " (document index entry " + std::to_string(place) + ")");
            }
            for (; asked < entries && asked <= place + kDocumentsAhead; ++asked) {
                const std::int64_t next = static_cast<std::int64_t>(documents[asked]);
                if (next >= 0 && next < sequences) {
                    prefetch(lengths + next);
                }
            }
            const std::int64_t id = static_cast<std::int64_t>(documents[place]);
            if (id < 0 || id >= sequences) {
                refuse("document index entry " + std::to_string(place) + " names sequence " + std::to_string(id) + " of " +
                       std::to_string(sequences));
            }
            const std::int64_t length = lengths[id];
            if (length < 0) {
                refuse("sequence " + std::to_string(id) + " has the negative length " + std::to_string(length));
            }
            const std::int64_t left = length - offset;
            remaining -= left;
            if (remaining <= 0) {
                // The last token of this sample is the first of the next one.
                offset += remaining + left - 1;
                break;
            }
            ++place;
            offset = 0;
        }
        rows[2 * sample] = static_cast<Entry>(place);
        rows[2 * sample + 1] = static_cast<Entry>(offset);
    }
}

template <typename Id, typename Entry>
py::array build_rows(const py::array_t<std::int32_t, py::array::c_style>& lengths,
                     const py::array_t<Id, py::array::c_style>& documents, std::int64_t sequence_length,
                     std::int64_t samples) {
    py::array_t<Entry> rows({static_cast<py::ssize_t>(samples) + 1, static_cast<py::ssize_t>(2)});
    const std::int32_t* from = lengths.data();
    const Id* order = documents.data();
    Entry* to = rows.mutable_data();
    const std::int64_t sequences = lengths.size();
    const std::int64_t entries = documents.size();
    {
        py::gil_scoped_release released;
        fill_sample_index(from, sequences, order, entries, sequence_length, samples, to);
    }
    return rows;
}

template <typename Id>
py::array build_rows_of_width(const py::array_t<std::int32_t, py::array::c_style>& lengths, const py::array& documents,
                              std::int64_t sequence_length, std::int64_t samples, bool wide) {
    auto order = py::array_t<Id, py::array::c_style>::ensure(documents);
    if (!order) {
        throw py::error_already_set();
    }
    if (wide) {
        return build_rows<Id, std::int64_t>(lengths, order, sequence_length, samples);
    }
    return build_rows<Id, std::int32_t>(lengths, order, sequence_length, samples);
}

py::array build_sample_index(const py::array_t<std::int32_t, py::array::c_style>& lengths, const py::array& documents,
                             std::int64_t sequence_length, std::int64_t samples, bool wide) {
    if (lengths.ndim() != 1 || documents.ndim() != 1) {
        refuse("lengths and documents must be one-dimensional");
    }
    if (sequence_length < 1 || sequence_length > std::numeric_limits<std::int32_t>::max()) {
        refuse("the sequence length " + std::to_string(sequence_length) + " must be at least 1 and below 2^31");
    }
    if (samples < 0 || samples > (std::int64_t{1} << 48)) {
        refuse("the number of samples " + std::to_string(samples) + " must be at least 0 and at most 2^48");
    }
    if (!wide && documents.size() > std::numeric_limits<std::int32_t>::max()) {
        refuse(std::to_string(documents.size()) + " documents do not fit 32-bit rows");
    }
    if (documents.dtype().kind() != 'i') {
        refuse("documents must be signed integers");
    }
    if (documents.itemsize() == 4) {
        return build_rows_of_width<std::int32_t>(lengths, documents, sequence_length, samples, wide);
    }
    if (documents.itemsize() == 8) {
        return build_rows_of_width<std::int64_t>(lengths, documents, sequence_length, samples, wide);
    }
    refuse("documents must be int32 or int64");
}

// Number of swaps drawn before they are executed.
constexpr std::int64_t kSwapsAhead = 128;

// Continues a Fisher-Yates shuffle at `place`, the last entry that is not final, until the draws are used up.
// An entry is swapped with one up to it, given by the draw's low bits; draws that are too large are rejected.
// Returns the new `place` and the number of used draws.
template <typename Entry>
std::pair<std::int64_t, std::int64_t> settle(Entry* values, std::int64_t place, const std::uint32_t* draws,
                                             std::int64_t count) {
    std::uint32_t mask = 0;
    while (mask < static_cast<std::uint32_t>(place)) {
        mask = (mask << 1) | 1;
    }
    std::int64_t used = 0;
    std::int64_t chosen[kSwapsAhead + 1];
    while (place > 0 && used < count) {
        std::int64_t decided = 0;
        std::int64_t at = place;
        for (; used < count && decided < kSwapsAhead && at > 0; ++used) {
            mask >>= static_cast<std::uint32_t>(at) <= (mask >> 1);
            const std::int64_t candidate = static_cast<std::int64_t>(draws[used] & mask);
            // Rejected draws are written and then overwritten, since a branch on them would be unpredictable.
            const std::int64_t fits = candidate <= at;
            prefetch(values + (fits ? candidate : at));
            chosen[decided] = candidate;
            decided += fits;
            at -= fits;
        }
        for (std::int64_t swap = 0; swap < decided; ++swap) {
            std::swap(values[place - swap], values[chosen[swap]]);
        }
        place = at;
    }
    return {place, used};
}

template <typename Entry>
py::tuple settle_array(py::array& values, std::int64_t place,
                       const py::array_t<std::uint32_t, py::array::c_style>& draws) {
    Entry* entries = static_cast<Entry*>(values.mutable_data());
    const std::uint32_t* from = draws.data();
    const std::int64_t count = draws.size();
    std::pair<std::int64_t, std::int64_t> reached;
    {
        py::gil_scoped_release released;
        reached = settle<Entry>(entries, place, from, count);
    }
    return py::make_tuple(reached.first, reached.second);
}

py::tuple shuffle(py::array values, std::int64_t place,
                  const py::array_t<std::uint32_t, py::array::c_style>& draws) {
    if (values.ndim() != 1 || draws.ndim() != 1 || !(values.flags() & py::array::c_style)) {
        refuse("values and draws must be one-dimensional and contiguous");
    }
    if (place < 0 || place >= values.size() || place > std::numeric_limits<std::uint32_t>::max()) {
        refuse("place " + std::to_string(place) + " is not one of " + std::to_string(values.size()) +
               " entries, or not below 2^32");
    }
    if (values.itemsize() == 4) {
        return settle_array<std::uint32_t>(values, place, draws);
    }
    if (values.itemsize() == 8) {
        return settle_array<std::uint64_t>(values, place, draws);
    }
    refuse("values must have 4 or 8 bytes each");
}

template <typename Source>
void fill_blend(const double* weights, std::int64_t count, std::int64_t size, Source* sources, std::int64_t* samples) {
    std::vector<std::int64_t> taken(static_cast<std::size_t>(count), 0);
    for (std::int64_t position = 0; position < size; ++position) {
        const double reached = std::max(static_cast<double>(position), 1.0);
        std::int64_t chosen = 0;
        double largest = weights[0] * reached - static_cast<double>(taken[0]);
        for (std::int64_t source = 1; source < count; ++source) {
            const double behind = weights[source] * reached - static_cast<double>(taken[static_cast<std::size_t>(source)]);
            if (behind > largest) {
                largest = behind;
                chosen = source;
            }
        }
        sources[position] = static_cast<Source>(chosen);
        samples[position] = taken[static_cast<std::size_t>(chosen)]++;
    }
}

template <typename Source>
py::tuple build_blend(const py::array_t<double, py::array::c_style>& weights, std::int64_t size) {
    py::array_t<Source> sources(static_cast<py::ssize_t>(size));
    py::array_t<std::int64_t> samples(static_cast<py::ssize_t>(size));
    const double* from = weights.data();
    const std::int64_t count = weights.size();
    Source* source = sources.mutable_data();
    std::int64_t* sample = samples.mutable_data();
    {
        py::gil_scoped_release released;
        fill_blend(from, count, size, source, sample);
    }
    return py::make_tuple(sources, samples);
}

py::tuple build_blend_index(const py::array_t<double, py::array::c_style | py::array::forcecast>& weights,
                            std::int64_t size) {
    if (weights.ndim() != 1 || weights.size() < 1) {
        refuse("a blend needs at least one weight");
    }
    if (size < 0 || size > (std::int64_t{1} << 48)) {
        refuse("the size " + std::to_string(size) + " must be at least 0 and at most 2^48");
    }
    if (weights.size() > std::numeric_limits<std::int32_t>::max()) {
        refuse("a blend of " + std::to_string(weights.size()) + " sources is not possible");
    }
    for (py::ssize_t source = 0; source < weights.size(); ++source) {
        const double weight = weights.data()[source];
        if (!(weight >= 0.0 && weight <= std::numeric_limits<double>::max())) {
            refuse("weight " + std::to_string(source) + " is " + std::to_string(weight) + "; it must be a number of at least 0");
        }
    }
    if (weights.size() < 255) {
        return build_blend<std::uint8_t>(weights, size);
    }
    if (weights.size() < 32767) {
        return build_blend<std::int16_t>(weights, size);
    }
    return build_blend<std::int32_t>(weights, size);
}

template <typename Entry>
py::array build_map(const std::int32_t* lengths, const std::int64_t* firsts, const std::int64_t* lasts,
                    std::int64_t documents, const sentence_map::Rules& rules) {
    std::vector<Entry> rows;
    {
        py::gil_scoped_release released;
        rows = sentence_map::build<Entry>(lengths, firsts, lasts, documents, rules);
    }
    py::array_t<Entry> result({static_cast<py::ssize_t>(rows.size() / 3), static_cast<py::ssize_t>(3)});
    std::copy(rows.begin(), rows.end(), result.mutable_data());
    return result;
}

py::array build_sentence_map(const py::array_t<std::int32_t, py::array::c_style>& lengths,
                             const py::array_t<std::int64_t, py::array::c_style>& firsts,
                             const py::array_t<std::int64_t, py::array::c_style>& lasts, std::int64_t epochs,
                             std::int64_t samples, std::uint32_t most_tokens, std::uint32_t short_ratio,
                             std::uint32_t seed, std::int64_t least_sentences, bool wide) {
    if (lengths.ndim() != 1 || firsts.ndim() != 1 || lasts.ndim() != 1 || firsts.size() != lasts.size()) {
        refuse("lengths, firsts and lasts must be one-dimensional, with a last for each first");
    }
    if (most_tokens < 2 || least_sentences < 1) {
        refuse("a sample must have at least 2 tokens and 1 sentence, not " + std::to_string(most_tokens) + " and " +
               std::to_string(least_sentences));
    }
    for (py::ssize_t document = 0; document < firsts.size(); ++document) {
        const std::int64_t first = firsts.data()[document];
        const std::int64_t last = lasts.data()[document];
        if (first < 0 || first >= last || last > lengths.size()) {
            refuse("document " + std::to_string(document) + " has the sentences " + std::to_string(first) + " to " +
                   std::to_string(last) + " of " + std::to_string(lengths.size()));
        }
    }
    const sentence_map::Rules rules{epochs, samples, most_tokens, short_ratio, seed, least_sentences};
    if (wide) {
        return build_map<std::uint64_t>(lengths.data(), firsts.data(), lasts.data(), firsts.size(), rules);
    }
    return build_map<std::uint32_t>(lengths.data(), firsts.data(), lasts.data(), firsts.size(), rules);
}

}  // namespace

PYBIND11_MODULE(_index_builder, module) {
    module.doc() = "Sample and blend order of Megatron-style data sets, and NumPy's shuffle, compiled.";
    module.attr("INTERFACE") = 3;
    module.def("build_sample_index", &build_sample_index, py::arg("lengths"), py::arg("documents"),
               py::arg("sequence_length"), py::arg("samples"), py::arg("wide"));
    module.def("shuffle", &shuffle, py::arg("values").noconvert(), py::arg("place"), py::arg("draws").noconvert());
    module.def("build_blend_index", &build_blend_index, py::arg("weights"), py::arg("size"));
    module.def("build_sentence_map", &build_sentence_map, py::arg("lengths"), py::arg("firsts"), py::arg("lasts"),
               py::arg("epochs"), py::arg("samples"), py::arg("most_tokens"), py::arg("short_ratio"), py::arg("seed"),
               py::arg("least_sentences"), py::arg("wide"));
}
