//! Ordinary tokens by their bytes.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::vocabulary::Strings;

/// Ordinary tokens by their bytes, which lie in the arena of pieces.
#[derive(Debug)]
pub(super) struct TokenIndex {
    table: HashTable<u32>,
    hasher: DefaultHashBuilder,
}

impl TokenIndex {
    pub fn with_capacity(count: usize) -> Self {
        Self { table: HashTable::with_capacity(count), hasher: DefaultHashBuilder::default() }
    }

    /// Adds token `id`, unless it is empty or its bytes are there already.
    pub fn insert(&mut self, pieces: &Strings, id: u32) {
        let piece = |id: u32| pieces.get(id as usize).unwrap_or_default();
        let bytes = piece(id);
        if bytes.is_empty() {
            return;
        }
        let hash = self.hasher.hash_one(bytes);
        self.table
            .entry(hash, |&other| piece(other) == bytes, |&other| self.hasher.hash_one(piece(other)))
            .or_insert(id);
    }

    /// The token whose bytes are `bytes`.
    pub fn find(&self, pieces: &Strings, bytes: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash_one(bytes);
        self.table.find(hash, |&id| pieces.get(id as usize) == Some(bytes)).copied()
    }
}
