//! Rows of a matrix where they lie in mapped files, whatever the file format, and how their values are encoded.

use std::ops::Range;
use std::sync::Arc;

use super::mapping::Mapping;
use super::quant::GgmlType;

/// A run of bytes of a mapped file.
#[derive(Debug, Clone)]
pub struct Span {
    file: Arc<Mapping>,
    range: Range<usize>,
}

impl Span {
    /// The bytes `range` of `file`; none if they do not lie in it.
    pub fn new(file: Arc<Mapping>, range: Range<usize>) -> Option<Self> {
        (*file).as_ref().get(range.clone())?;
        Some(Self { file, range })
    }

    /// Has the system read its bytes from the disk, without waiting for it.
    pub fn prefetch(&self) {
        self.file.prefetch(self.range.clone());
    }

    /// No bytes of `file`.
    pub fn none(file: Arc<Mapping>) -> Self {
        Self { file, range: 0..0 }
    }

    /// The file.
    pub fn file(&self) -> &Arc<Mapping> {
        &self.file
    }

    /// A part of it; none if it does not lie in it.
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start;
        Some(Self { file: Arc::clone(&self.file), range: start + range.start..start + range.end })
    }
}

impl AsRef<[u8]> for Span {
    fn as_ref(&self) -> &[u8] {
        // `new` has looked it up before; the map keeps its length.
        (*self.file).as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

/// How the values of [`Rows`] are encoded.
#[derive(Debug, Clone)]
pub enum Encoding {
    /// Blocks of a GGML type; plain numbers of a safetensors file are the types F32, F16 and BF16.
    Ggml(GgmlType),
    /// 4-bit codes of `dg-w4a16-v1`, two a byte, the lower nibble first: weight = (code - zero) * scale.
    W4 {
        /// f16 `[rows][columns / group]`.
        scales: Span,
        /// f16 `[rows][columns / group]`, whole numbers from 0 to 15.
        zeros: Span,
        /// Columns that share a scale: a multiple of 64.
        group: usize,
    },
    /// Plain numbers of that type (F32, F16 or BF16), to be quantised on the way to the device as `dg-w4a16-v1` does it.
    ToW4 {
        /// What the file holds.
        from: GgmlType,
        /// Columns that share a scale: a multiple of 64.
        group: usize,
    },
    /// Plain numbers of that type (F32, F16 or BF16), to be quantised on the way to the device to 8 bits, as Q8_0.
    ToQ8(GgmlType),
    /// Blocks of a GGML type, a column of the matrix after the other.
    Turned(GgmlType),
}

/// Rows of a matrix in a mapped file.
#[derive(Debug, Clone)]
pub struct Rows {
    /// The tensor's name in its file.
    pub name: String,
    /// How `bytes` encode values.
    pub encoding: Encoding,
    /// How many rows there are.
    pub rows: usize,
    /// Values in a row.
    pub columns: usize,
    /// The rows, one after the other; for [`Encoding::W4`] the codes.
    pub bytes: Span,
}

impl Rows {
    /// The matrix whose columns are these rows; none if they are encoded in another way than GGML types.
    pub fn turned(self) -> Option<Rows> {
        let Encoding::Ggml(ty) = self.encoding else { return None };
        Some(Rows { encoding: Encoding::Turned(ty), rows: self.columns, columns: self.rows, ..self })
    }

    /// `count` rows from row `first` on, under the same name; none if there are not so many.
    pub fn part(&self, first: usize, count: usize) -> Option<Rows> {
        let end = first.checked_add(count).filter(|&end| end <= self.rows)?;
        let of = |span: &Span, row_bytes: usize| {
            span.part(first.checked_mul(row_bytes)?..end.checked_mul(row_bytes)?)
        };
        let plain_bytes = |ty: GgmlType| ty.bytes_for(self.columns as u64)?.try_into().ok();
        let (row_bytes, encoding) = match &self.encoding {
            Encoding::Turned(_) => return None, // its rows do not lie together
            &Encoding::Ggml(ty) => (plain_bytes(ty)?, self.encoding.clone()),
            &Encoding::ToW4 { from, .. } | &Encoding::ToQ8(from) => {
                (plain_bytes(from)?, self.encoding.clone())
            }
            Encoding::W4 { scales, zeros, group } => {
                let group_bytes = self.columns.checked_div(*group)?.checked_mul(2)?;
                let scales = of(scales, group_bytes)?;
                let zeros = of(zeros, group_bytes)?;
                (self.columns / 2, Encoding::W4 { scales, zeros, group: *group })
            }
        };
        let bytes = of(&self.bytes, row_bytes)?;
        Some(Rows { name: self.name.clone(), encoding, rows: count, columns: self.columns, bytes })
    }
}

impl Rows {
    /// Has the system read these rows from the disk, without waiting for it.
    pub fn prefetch(&self, rows: Range<usize>) {
        match self.part(rows.start, rows.len()) {
            Some(part) => {
                part.bytes.prefetch();
                if let Encoding::W4 { scales, zeros, .. } = &part.encoding {
                    scales.prefetch();
                    zeros.prefetch();
                }
            }
            // Rows that do not lie together.
            None => self.bytes.prefetch(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 24 bytes, each its own number.
    fn span() -> (tempfile::NamedTempFile, Span) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), (0..24).collect::<Vec<u8>>()).unwrap();
        let map = Arc::new(Mapping::open(file.path()).unwrap());
        let span = Span::new(map, 0..24).unwrap();
        (file, span)
    }

    fn rows(encoding: Encoding, columns: usize, bytes: Span) -> Rows {
        Rows { name: "a".to_owned(), encoding, rows: 3, columns, bytes }
    }

    #[test]
    fn parts_are_whole_rows_of_every_encoding() {
        let (_file, span) = span();
        let plain = rows(Encoding::Ggml(GgmlType::BF16), 4, span.clone());
        assert_eq!(plain.part(1, 2).unwrap().bytes.as_ref(), &(8..24).collect::<Vec<u8>>());
        assert_eq!(
            plain.part(1, 2).unwrap().part(1, 1).unwrap().bytes.as_ref(),
            [16, 17, 18, 19, 20, 21, 22, 23]
        );
        let later = rows(Encoding::ToW4 { from: GgmlType::F32, group: 2 }, 2, span.clone());
        assert_eq!(later.part(0, 1).unwrap().bytes.as_ref(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let (scales, zeros) = (span.part(0..12).unwrap(), span.part(12..24).unwrap());
        let codes = rows(Encoding::W4 { scales, zeros, group: 2 }, 4, span.part(4..10).unwrap());
        let part = codes.part(1, 1).unwrap();
        assert_eq!(part.bytes.as_ref(), [6, 7]);
        let Encoding::W4 { scales, zeros, group: 2 } = part.encoding else { panic!("{:?}", part.encoding) };
        assert_eq!((scales.as_ref(), zeros.as_ref()), (&[4, 5, 6, 7][..], &[16, 17, 18, 19][..]));
    }

    #[test]
    fn there_are_no_parts_outside() {
        let (_file, span) = span();
        let plain = rows(Encoding::Ggml(GgmlType::BF16), 4, span.clone());
        assert_eq!(plain.part(3, 0).unwrap().rows, 0);
        for (first, count) in [(4, 0), (3, 1), (0, 4), (usize::MAX, 1), (1, usize::MAX)] {
            assert!(plain.part(first, count).is_none(), "{first} {count}");
        }
        // More rows than bytes, and rows that are no whole blocks.
        assert!(rows(Encoding::Ggml(GgmlType::F32), 4, span.clone()).part(2, 1).is_none());
        assert!(rows(Encoding::Ggml(GgmlType::Q4_0), 16, span.clone()).part(0, 1).is_none());
        let (scales, zeros) = (span.part(0..2).unwrap(), span.clone());
        let codes = rows(Encoding::W4 { scales, zeros, group: 2 }, 4, span.clone());
        assert!(codes.part(1, 1).is_none());
        let zero_group = Encoding::W4 { scales: span.clone(), zeros: span.clone(), group: 0 };
        assert!(rows(zero_group, 4, span).part(0, 1).is_none());
    }
}
