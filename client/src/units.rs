//! Figures as people read them.

/// `1536` bytes as `1.5 KiB`: three digits, binary units.
pub fn bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    // From 1023.5 on rounding would show 1024, which is 1.0 of the next unit.
    while value >= 1023.5
        && let Some(next) = units.next()
    {
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" || value >= 99.95 { format!("{value:.0} {unit}") } else { format!("{value:.1} {unit}") }
}

/// Seconds as `850 ms`, `12.3 s`, `5 min 2 s`, `3 h 4 min` or `2 d 1 h`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        _ if seconds < 0.9995 => format!("{:.0} ms", seconds * 1000.0),
        _ if seconds < 59.95 => format!("{seconds:.1} s"),
        0..3_600 => format!("{} min {} s", whole / 60, whole % 60),
        3_600..86_400 => format!("{} h {} min", whole / 3_600, whole % 3_600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3_600),
    }
}

/// A rate such as `85.2 t/s`; `n/a` where nothing was measured.
pub fn rate(count: u64, seconds: f64) -> String {
    if count == 0 || seconds <= 0.0 { "n/a".to_owned() } else { format!("{:.1} t/s", count as f64 / seconds) }
}

/// A figure, or `n/a` where the system does not tell.
pub fn known<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "n/a".to_owned(), show)
}

/// `text` without anything that would steer the terminal.
pub fn plain(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() { safe.extend(char.escape_default()) } else { safe.push(char) }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_two_or_three_digits() {
        let shown: Vec<_> = [0, 1023, 1024, 1536, 102_400, 1_048_064, 1_048_575, 5 << 30, u64::MAX]
            .into_iter()
            .map(bytes)
            .collect();
        let expected =
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "100 KiB", "1.0 MiB", "1.0 MiB", "5.0 GiB", "16384 PiB"];
        assert_eq!(shown, expected);
    }

    #[test]
    fn durations_choose_their_unit() {
        let shown: Vec<_> =
            [0.0, 0.85, 0.9999, 12.34, 59.96, 302.0, 11_050.0, 176_400.0].into_iter().map(duration).collect();
        let expected =
            ["0 ms", "850 ms", "1.0 s", "12.3 s", "1 min 0 s", "5 min 2 s", "3 h 4 min", "2 d 1 h"];
        assert_eq!(shown, expected);
    }

    #[test]
    fn rates_and_gaps() {
        assert_eq!(rate(170, 2.0), "85.0 t/s");
        assert_eq!(rate(0, 2.0), "n/a");
        assert_eq!(rate(5, 0.0), "n/a");
        assert_eq!(known(None::<u64>, bytes), "n/a");
        assert_eq!(known(Some(1024), bytes), "1.0 KiB");
    }

    #[test]
    fn text_cannot_steer_the_terminal() {
        assert_eq!(plain("a\u{1b}[2Jb\nc\u{7}ä"), "a\\u{1b}[2Jb\\nc\\u{7}ä");
    }
}
