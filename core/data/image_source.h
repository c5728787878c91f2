// Sources of images with labels: class folders (on disk or in an archive), CIFAR-10's binary files,
// IDX files. Invariant: items are ordered by label and name, so number and label of a picture are
// the same on every rank and machine.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/data/image.h"
#include "core/io/hash.h"

namespace tessera::data {

/// What is done about images that cannot be read.
enum class BadImages {
  kStop,  // reading one ends the run with its error
  kSkip,  // they are left out; the log names them and they are counted
};

/// The error of an image that cannot be read or made into a row, which the text names;
/// BadImages::kSkip leaves the image out instead.
class BadImage : public UserError {
 public:
  using UserError::UserError;
};
/// The error of an archive that is cut off: all behind that place is missing, perhaps whole
/// classes.
class CutArchive : public BadImage {
 public:
  using BadImage::BadImage;
};

class ImageSource {
 public:
  virtual ~ImageSource() = default;
  virtual int64_t size() const = 0;
  virtual int64_t label(int64_t item) const = 0;
  /// File of the item, for messages.
  virtual std::string name(int64_t item) const = 0;
  /// Throws UserError with name and reason. Thread-safe.
  virtual Image read(int64_t item) const = 0;
};

struct ImageSplit {
  std::shared_ptr<const ImageSource> train, validation;  // validation may be null
  std::vector<std::string> classes;                      // by label
  // A hash of the data: for images: of names and sizes of the files, which are not read for it (of
  // at most 100,000 sizes in a folder); for cifar10: and idx: of all bytes.
  io::Digest hash = {};
  int64_t side = 0;  // of all images, where their format gives them one size; else 0
};

/// `images:PATH`: a folder, or a tar archive (compressed ones are held in memory), of class folders
/// with JPEG and PNG files. Beside each other, `train` and one of `val`, `validation`, `test` are
/// the two splits (the first of these that exists); of class folders alone the last tenth of each
/// class, by name, validates. Labels number the classes by name. Links to files and folders are
/// followed in a folder; in an archive hard links are, symbolic ones are left out. So are hidden
/// files and those of other kinds; a warning counts them.
/// `cifar10:DIR`: data_batch_1.bin to data_batch_5.bin, and test_batch.bin, which validates.
/// `idx:DIR`: train-images-idx3-ubyte and so on, as MNIST; t10k validates.
/// Throws UserError with the path for what is missing, damaged, or laid out otherwise, and for a
/// class without images, and for a link that leads to nothing or to a folder around it. An archive
/// that is cut off is an error, or ends there for kSkip; between two files too, where the blocks of
/// zeros that end every tar archive are missing.
ImageSplit load_images(const std::string& kind_and_path, BadImages bad = BadImages::kStop);

}  // namespace tessera::data
