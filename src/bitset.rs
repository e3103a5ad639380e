//! A set of parameters as a row of bits: pure, small, and equal exactly when the sets are equal.

/// One bit per parameter, in words of 64, lowest bit first. Trailing zero words are never kept, so that two rows are equal
/// when their sets are, however many parameters were known when each was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row(Vec<u64>);

impl Row {
    /// The row with these words, lowest parameter first.
    pub fn from_words(mut words: Vec<u64>) -> Self {
        while words.last() == Some(&0) {
            words.pop();
        }
        Self(words)
    }

    /// The words, without trailing zeros.
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// Whether no parameter is in the set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of parameters in the set.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Whether parameter `index` is in the set.
    pub fn contains(&self, index: u32) -> bool {
        self.0.get(index as usize / 64).is_some_and(|w| w >> (index % 64) & 1 == 1)
    }

    /// One more than the highest parameter in the set; 0 for the empty set.
    pub fn end(&self) -> u32 {
        self.0.last().map_or(0, |w| self.0.len() as u32 * 64 - w.leading_zeros())
    }

    /// The parameters in the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().enumerate().flat_map(|(i, &word)| {
            let rest = |w: &u64| (w & (w - 1) != 0).then_some(w & (w.wrapping_sub(1)));
            std::iter::successors((word != 0).then_some(word), rest).map(move |w| i as u32 * 64 + w.trailing_zeros())
        })
    }

    /// In either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let (long, short) = if self.0.len() >= other.0.len() { (self, other) } else { (other, self) };
        let mut words = long.0.clone();
        for (a, b) in words.iter_mut().zip(&short.0) {
            *a |= b;
        }
        Self(words)
    }

    /// In both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        Self::from_words(self.0.iter().zip(&other.0).map(|(a, b)| a & b).collect())
    }

    /// In this set and not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut words = self.0.clone();
        for (a, b) in words.iter_mut().zip(&other.0) {
            *a &= !b;
        }
        Self::from_words(words)
    }

    /// The same set after renumbering: parameter `i` becomes `ids[i]`. Every member must have an entry.
    #[must_use]
    pub fn renumbered(&self, ids: &[u32]) -> Self {
        self.iter().map(|i| ids[i as usize]).collect()
    }
}

impl FromIterator<u32> for Row {
    fn from_iter<I: IntoIterator<Item = u32>>(indices: I) -> Self {
        let mut words = Vec::new();
        for index in indices {
            let word = index as usize / 64;
            if word >= words.len() {
                words.resize(word + 1, 0);
            }
            words[word] |= 1 << (index % 64);
        }
        Self(words)
    }
}
