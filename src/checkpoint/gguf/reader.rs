//! A cursor over a file's bytes that never leaves them.

use std::ops::Range;
use std::path::Path;

use super::error::{COPY_AGAIN, Fault, Place, quoted};

/// Reads little-endian fields one after the other; every failure names the place that is being read.
pub(super) struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
    /// What is being read, for errors.
    pub place: Place,
}

impl<'a> Reader<'a> {
    pub fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Reader { path, bytes, at: 0, place: Place::Header }
    }

    /// The offset of the next byte.
    pub fn at(&self) -> usize {
        self.at
    }

    /// How many bytes are left.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The error for something found at `offset` of the place that is being read.
    pub fn fault(
        &self,
        offset: usize,
        found: impl Into<String>,
        expected: impl Into<String>,
        advice: &'static str,
    ) -> Box<Fault> {
        Box::new(Fault {
            path: self.path.to_owned(),
            place: self.place.clone(),
            offset: offset as u64,
            found: found.into(),
            expected: expected.into(),
            advice,
        })
    }

    /// The next `n` bytes, which hold `what`.
    pub fn take(&mut self, n: u64, what: &str) -> Result<&'a [u8], Box<Fault>> {
        let end = usize::try_from(n).ok().and_then(|n| self.at.checked_add(n));
        let Some(bytes) = end.and_then(|end| self.bytes.get(self.at..end)) else {
            let found = format!("{} bytes to the end of the file", self.left());
            return Err(self.fault(self.at, found, format!("{n} bytes of {what}"), COPY_AGAIN));
        };
        self.at += bytes.len();
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Box<Fault>> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, Box<Fault>> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, Box<Fault>> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A 64-bit count of things that take at least `least` bytes each, so that no count can ask for more
    /// memory or time than the file's own length justifies.
    pub fn count(&mut self, least: usize, what: &str) -> Result<usize, Box<Fault>> {
        let start = self.at;
        let count = self.u64(&format!("the number of {what}"))?;
        let most = self.left() / least;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(self.fault(
                start,
                format!("a count of {count} {what}"),
                format!("at most {most}, as many as the rest of the file could hold"),
                COPY_AGAIN,
            )),
        }
    }

    /// The text of a length-prefixed UTF-8 string, and where its bytes lie.
    pub fn string(&mut self, what: &str) -> Result<(&'a str, Range<usize>), Box<Fault>> {
        let len = self.u64("a length")?;
        let start = self.at;
        let bytes = self.take(len, what)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok((text, start..self.at)),
            Err(error) => {
                let valid = String::from_utf8_lossy(&bytes[..error.valid_up_to()]);
                let found = format!("bytes that are not UTF-8 after {}", quoted(&valid));
                Err(self.fault(start + error.valid_up_to(), found, format!("UTF-8 in {what}"), COPY_AGAIN))
            }
        }
    }
}
