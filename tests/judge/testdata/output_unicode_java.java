public class Main {
  public static void main(String[] args) { System.out.println("\u00fc\u4e2d\ud83d\ude00"); }
}
